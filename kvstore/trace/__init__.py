"""Replay of request traces through the store's index."""
