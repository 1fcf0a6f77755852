"""The load generator: what to send and when, two doors, what was measured, every token checked."""
