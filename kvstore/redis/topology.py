"""Which server has which key: one, or those of a cluster by the slots they own.

A block has a first place and some others, should the server of the first be gone: until somebody
takes over its slots, blocks are then put to, and looked for in, the next place whose server is
there. Without it a chain of blocks would end for good at the first that belongs to a dead server.
"""

from __future__ import annotations

import binascii
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import cast

from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.dialling import library_client
from kvstore.redis.server import RedisServer
from kvstore.redis.settings import RedisSettings

log = logging.getLogger("kvrelay.store")

SLOTS = 16384
PLACES = 6
_DIGITS = re.compile(rb"[0-9a-f]{%d}" % (2 * NAME_BYTES))
REFRESH_SECONDS = 0.2
"""Slots are asked for no more often than this, however much is not where it was."""


class Topology:
    """Thread-safe. The first call of a cluster, and one after a surprise, asks for the slots."""

    def __init__(
        self, settings: RedisSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes = {address: RedisServer(address, settings) for address in settings.addresses}
        self._owners: list[RedisServer | None] | None = None
        self._closed = False
        self._stale = False
        self._next = 0.0
        again = range(1, PLACES) if settings.cluster else ()
        self._prefixes = [
            f"{settings.prefix}:{part}".encode() for part in ("", *map("{}:".format, again))
        ]
        if not settings.cluster:
            self._owners = list(self._nodes.values())  # one, of whatever slot

    def prepare(self, deadline: Deadline) -> bool:
        """Know the slots, and whether they were asked for just now.

        ``Unavailable``: they are not known, and no server of the cluster could be asked.
        """
        with self._lock:
            now = self._clock()
            due = self._owners is None or (self._stale and now >= self._next)
            if not due:
                return False
            if self._owners is not None:
                self._next = now + REFRESH_SECONDS
            self._stale = False
        try:
            self._take(self._discovered(deadline))
        except KvrelayError:
            if self._owners is None:
                raise
            return False
        return True

    def doubt(self) -> None:
        """Something was not where it was thought to be."""
        with self._lock:
            self._stale = self._settings.cluster

    def place(
        self, name: bytes, up: Callable[[RedisServer], bool]
    ) -> tuple[RedisServer, bytes] | None:
        """The server and the key of a block; ``None`` if the servers of all its places are down."""
        owners = self._owners or ()
        written = name.hex().encode()
        for prefix in self._prefixes if owners else ():
            key = prefix + written
            node = owners[binascii.crc_hqx(key, 0) % len(owners)]
            if node is not None and up(node):
                return node, key
        return None

    def key(self, name: bytes, number: int = 0) -> bytes:
        """What a block is called on a server, in letters that are no part of a pattern."""
        return self._prefixes[number] + name.hex().encode()

    def name(self, key: bytes) -> bytes | None:
        """The block that a key is called after; ``None``: it is somebody else's key."""
        for prefix in self._prefixes:
            digits = key.removeprefix(prefix)
            if digits != key and _DIGITS.fullmatch(digits):
                return bytes.fromhex(digits.decode())
        return None

    def owners(self) -> list[RedisServer]:
        """Every server that has keys."""
        return [node for node in dict.fromkeys(self._owners or ()) if node is not None]

    def close(self) -> None:
        """Give up every connection."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _discovered(self, deadline: Deadline) -> list[Address | None]:
        """The owner of each slot, as the first server says that can be asked."""
        errors = []
        for address in self._known():
            try:
                # Half of what is left, so that a silent server does not spend it all.
                return slots(address, self._settings, deadline.earlier(_half(deadline)))
            except KvrelayError as error:
                errors.append(str(error))
        raise Unavailable(f"no server of {self._settings.url} tells its slots: {'; '.join(errors)}")

    def _known(self) -> list[Address]:
        """Those that were there last time, then those of the URL."""
        with self._lock:
            nodes = [n.address for n in self._nodes.values() if not n.circuit.open]
        return list(dict.fromkeys((*nodes, *self._settings.addresses)))

    def _take(self, addresses: list[Address | None]) -> None:
        wanted = {address for address in addresses if address is not None}
        with self._lock:
            if self._closed:
                return
            old = self._nodes
            self._nodes = {a: old.get(a) or RedisServer(a, self._settings) for a in wanted}
            self._owners = [None if a is None else self._nodes[a] for a in addresses]
            gone = [node for address, node in old.items() if address not in wanted]
        for node in gone:
            node.close()
        if wanted != set(old):
            names = ", ".join(sorted(map(str, wanted)))
            log.info("%s: blocks are kept by %s", self._settings.url, names)


_Entry = tuple[int, int, tuple[bytes, int]]
"""First and last slot, and their owner; what stands after that is not looked at."""


def _half(deadline: Deadline) -> float:
    return deadline.remaining() / 2


def slots(address: Address, settings: RedisSettings, deadline: Deadline) -> list[Address | None]:
    """The owner of each slot, as the server at ``address`` knows it."""
    with library_client(address, settings, deadline) as library:
        reply = cast(Callable[[str], list[_Entry]], library.execute_command)("CLUSTER SLOTS")
    owners: list[Address | None] = [None] * SLOTS
    try:
        for start, end, (host, port, *_), *_ in reply:
            if not 0 <= start <= end < SLOTS:
                raise ValueError(f"slots {start} to {end}")
            # Without a name of its own, a server is where it was asked.
            owner = Address(host.decode() if host else address.host, int(port))
            owners[start : end + 1] = [owner] * (end + 1 - start)
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt("slots", f"{address} answered what is none: {error}") from error
    return owners
