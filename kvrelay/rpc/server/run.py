"""A service as a process: memory and security settings, signals, exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

from kvrelay.errors import KvrelayError
from kvrelay.process import malloc
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.renewal import FixedTenants, no_tenants, renewed
from kvrelay.rpc.server.server import Server

log = logging.getLogger("kvrelay")
OPEN_FILES = 8192

Config = TypeVar("Config", bound=SecurityOptions)


def run_service(
    config: Config,
    serve: Callable[[Config], Coroutine[object, None, int]],
    fixed: FixedTenants = no_tenants,
) -> int:
    """Set up memory and security, then run ``serve`` while ``Renewal`` looks at the files.

    Returns its exit status, or 1 after logging a ``KvrelayError``.
    """
    malloc.limit_arenas()
    malloc.keep_large_buffers()
    malloc.trim_periodically()
    _raise_file_limit()
    try:
        policy.install(config).warn_if_open()
        with renewed(config, fixed):
            return asyncio.run(serve(config))
    except KvrelayError as error:
        log.error("%s", error)
        return 1


def _raise_file_limit() -> None:
    """Allow as many open files as a full server needs; many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if 0 <= soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve_until_signal(
    server: Server,
    ready: Callable[[str], str],
    on_stop: Callable[[Deadline], Awaitable[None]] | None = None,
    grace: float = 10.0,
) -> int:
    """Start the server, print ``ready(address)``, serve until SIGTERM or SIGINT.

    On the first signal the server reports NOT_SERVING, ``on_stop`` may drain until its deadline,
    and open calls get the rest of ``grace``. A second signal stops at once. Returns the exit
    status: 1 if the server ended by itself, so that no process outlives its port.
    """
    stopping = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gc.collect()
    gc.freeze()  # the objects of now live as long as the process; collecting them takes 0.3 s
    print(ready(await server.start()), flush=True)
    signalled = asyncio.ensure_future(stopping.wait())
    ended = asyncio.ensure_future(server.ended())
    await asyncio.wait((signalled, ended), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        log.error("the server ended by itself: %r", ended.exception())
        return 1
    deadline = Deadline.after(grace)
    drained = asyncio.ensure_future(_drain(server, on_stop, deadline))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if drained.done():
        drained.result()  # raises the error of ``on_stop``
    else:
        drained.cancel()
        await server.stop(0.0)
    return 0


async def _drain(
    server: Server, on_stop: Callable[[Deadline], Awaitable[None]] | None, deadline: Deadline
) -> None:
    await server.health.leave()
    try:
        if on_stop is not None:
            async with asyncio.timeout(deadline.remaining()):
                await on_stop(deadline)
    except TimeoutError:
        log.warning("not drained in time: open calls are cut off")
    finally:
        await server.stop(deadline.remaining())
