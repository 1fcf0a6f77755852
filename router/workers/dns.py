"""Workers behind DNS names: ``dns:///NAME:PORT`` stands for every A and AAAA address of the name.

Names are looked up on an interval, in threads of their own. While a name cannot be resolved, its
last addresses stay: a name server that is down removes no worker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address

log = logging.getLogger("kvrelay.router")
SCHEME = "dns:///"
LOOKUP_SECONDS = 3.0
THREADS = 4  # at most so many are blocked by a resolver that hangs

Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name; ``OSError`` if it has none."""
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(Address(str(result[4][0]), port)) for result in results]


def parse_name(field: str, text: str) -> Address:
    """An address, or a name to look up with its port; ``Rejected`` for ``field``."""
    try:
        return Address.parse(text.removeprefix(SCHEME))
    except Rejected as error:
        wanted = f"{SCHEME}NAME:PORT" if text.startswith(SCHEME) else "HOST:PORT, unix:PATH"
        raise Rejected(field, f"{text!r} is not {wanted}") from error


@dataclass(slots=True)
class _Lookup:
    """The last result for one name, and when it is looked up again."""

    addresses: tuple[str, ...] = ()
    due: float = float("-inf")
    problem: str = ""


class DnsNames:
    """The last addresses of every name. Not for several tasks at once."""

    def __init__(self, interval: float, resolve: Resolve = resolve) -> None:
        self._interval = interval
        self._resolve = resolve
        self._known: dict[str, _Lookup] = {}
        self._threads = ThreadPoolExecutor(THREADS, "dns")

    async def expand(self, entries: Sequence[str], now: float) -> tuple[str, ...]:
        """The entries, each name replaced by its addresses; names that are due are looked up."""
        names = dict.fromkeys(entry for entry in entries if entry.startswith(SCHEME))
        for name in names:
            self._known.setdefault(name, _Lookup())
        await asyncio.gather(*(self._look_up(name, now) for name in names))
        addresses: list[str] = []
        for entry in entries:
            addresses += self._known[entry].addresses if entry in self._known else (entry,)
        return tuple(dict.fromkeys(addresses))

    def keep(self, entries: Sequence[str]) -> None:
        """Forget every name that is not in ``entries``."""
        self._known = {name: known for name, known in self._known.items() if name in entries}

    async def _look_up(self, name: str, now: float) -> None:
        known = self._known[name]
        if now < known.due:
            return
        known.due = now + self._interval
        target = parse_name("dns", name)
        try:
            result = asyncio.get_running_loop().run_in_executor(
                self._threads, self._resolve, target.host, target.port or 0
            )
            async with asyncio.timeout(LOOKUP_SECONDS):
                known.addresses = tuple(sorted(set(await result)))
            known.problem = ""
        except (OSError, UnicodeError) as error:  # TimeoutError among them
            problem = str(error) or "no answer in time"
            if problem != known.problem:
                log.warning("%s: %s; keeping its %d addresses", name, problem, len(known.addresses))
            known.problem = problem

    def close(self) -> None:
        """Stop the threads; no name is looked up afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
