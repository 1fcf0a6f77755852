"""A service as a process of its own, from its configuration to its exit status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TypeVar

from kvrelay.errors import KvrelayError
from kvrelay.process import malloc
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions

log = logging.getLogger("kvrelay")

Config = TypeVar("Config", bound=SecurityOptions)


def run(config: Config, serve: Callable[[Config], Coroutine[object, None, int]]) -> int:
    """``serve`` with memory and security set up; its status, or 1 for what was refused."""
    malloc.bound()
    malloc.keep_large_buffers()
    malloc.trim_periodically()
    try:
        policy.install(config)
        return asyncio.run(serve(config))
    except KvrelayError as error:
        log.error("%s", error)
        return 1
