"""Shared gRPC plumbing: server life cycle, channels, deadlines, status, tolerant parsing."""

import os

# A peer that goes away is ours to report; gRPC's C core would print its own lines beside it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
