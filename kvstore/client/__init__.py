"""Clients of the store service, and a store within this process."""
