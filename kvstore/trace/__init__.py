"""Traces of requests replayed through the store's own bookkeeping."""
