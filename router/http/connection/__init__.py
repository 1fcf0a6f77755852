"""The connections of the HTTP door: their bounds, what they read and write, their handshakes."""
