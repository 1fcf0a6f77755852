"""Shared gRPC plumbing: server life cycle, channels, deadlines, status, tolerant parsing."""

import os

# We report disconnected peers; gRPC's C core would print its own lines as well.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
