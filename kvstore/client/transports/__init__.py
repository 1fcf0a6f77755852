"""The ways of the bytes between the service and its clients."""
