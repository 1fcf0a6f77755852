"""Shared gRPC plumbing: server life cycle, channels, deadlines, status, tolerant parsing."""
