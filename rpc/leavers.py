"""Clients that leave while their status is on its way: a line for debugging, no traceback.

gRPC logs each as an error of the server, with its stack, so that whoever may connect could fill the
log. Every other error it logs stays what it is.
"""

from __future__ import annotations

import logging

GRPC = "grpc._cython.cygrpc"
log = logging.getLogger("kvrelay.rpc")


def _is_ours(record: logging.LogRecord) -> bool:
    # The type is not public: by name, so that a gRPC without it does no harm.
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != "ExecuteBatchError":
        return True
    log.debug("a client left before its status: %s", record.getMessage())
    return False


def hush() -> None:
    """For the whole process; again has no further effect."""
    logging.getLogger(GRPC).addFilter(_is_ours)
