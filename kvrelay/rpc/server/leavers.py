"""Clients that leave while their status is on its way, and headers that are no UTF-8: a line for
debugging, no traceback.

gRPC logs each as an error of the server, with its stack, so that whoever may connect could fill the
log, and a token that was spoilt on its way would stand there. Every other error stays what it is.
"""

from __future__ import annotations

import logging

GRPC = "grpc._cython.cygrpc"
UNREADABLE = "Invalid encoding on"  # and the value
log = logging.getLogger("kvrelay.rpc")


def _is_ours(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith(UNREADABLE):
        log.debug("a header is no UTF-8")
        return False
    # The type is not public: by name, so that a gRPC without it does no harm.
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != "ExecuteBatchError":
        return True
    log.debug("a client left before its status: %s", record.getMessage())
    return False


def quiet_grpc_log() -> None:
    """For the whole process; again has no further effect."""
    logging.getLogger(GRPC).addFilter(_is_ours)
