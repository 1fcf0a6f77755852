"""Transports: how the bytes of blocks move between a client and the store service."""
