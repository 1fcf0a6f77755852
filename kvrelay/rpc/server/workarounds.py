"""Calls whose method's name is no UTF-8: refused like any that there is not.

gRPC's serving task decodes the name strictly and outside of any call, so that one such call from
anybody ends the whole server (grpcio 1.85). The only way in between is the handler of errors that
strict decoding calls: in that task, and in no other, it reads such a name as another one.
"""

from __future__ import annotations

import asyncio
import codecs

SERVING = "AioServer._server_main_loop"  # of gRPC
_strict = codecs.lookup_error("strict")


def tolerate_bad_method_names() -> None:
    """For the whole process; again has no further effect."""
    codecs.register_error("strict", _decoding)


def _decoding(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError) and _serving():
        return "\N{REPLACEMENT CHARACTER}", len(error.object)
    return _strict(error)


def _serving() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and getattr(task.get_coro(), "__qualname__", None) == SERVING
