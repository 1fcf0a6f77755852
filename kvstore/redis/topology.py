"""Maps keys to servers: to the only server, or to the owner of the key's slot in a cluster.

A block has several places, each a key of its own. While the server of the first place is down and
no other server has taken over its slots, blocks are put to, and looked for in, the next place
whose server is up. Without it a chain of blocks would end at the first that belongs to a dead
server.

The cluster client of redis-py (8.1) cannot take this over: its timeouts are fixed per client and
not per call (with a silent server a pipeline of 40 commands took 78 s at ``socket_timeout``
0.5), a pipeline fails as a whole, the slot ranges of a reply are not bounded, and a key has one
place.
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
from kvstore.redis.connection import library_client
from kvstore.redis.server import RedisServer
from kvstore.redis.settings import RedisSettings

log = logging.getLogger("kvrelay.store")

SLOTS = 16384
PLACES = 6
_DIGITS = re.compile(rb"[0-9a-f]{%d}" % (2 * NAME_BYTES))
REFRESH_SECONDS = 0.2
"""Least time between two requests for the slots."""


class Topology:
    """Thread-safe. The first call of a cluster asks for the slots, and one after a redirection."""

    def __init__(
        self, settings: RedisSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._servers = {a: RedisServer(a, settings) for a in settings.addresses}
        self._owners: list[RedisServer | None] | None = None
        self._closed = False
        self._stale = False
        self._next_refresh = 0.0
        others = range(1, PLACES) if settings.cluster else ()
        self._prefixes = [
            f"{settings.prefix}:{part}".encode() for part in ("", *map("{}:".format, others))
        ]
        if not settings.cluster:
            self._owners = list(self._servers.values())  # one owns every slot

    def prepare(self, deadline: Deadline) -> bool:
        """Ask for the slots if they are not known or stale; whether they were asked for.

        ``Unavailable``: they are not known, and no server of the cluster could be asked.
        """
        with self._lock:
            now = self._clock()
            due = self._owners is None or (self._stale and now >= self._next_refresh)
            if not due:
                return False
            if self._owners is not None:
                self._next_refresh = now + REFRESH_SECONDS
            self._stale = False
        try:
            self._update(self._ask_slots(deadline))
        except KvrelayError:
            if self._owners is None:
                raise
            return False
        return True

    def mark_stale(self) -> None:
        """A server failed, or did not have a key that it should have."""
        with self._lock:
            self._stale = self._settings.cluster

    def place(
        self, name: bytes, usable: Callable[[RedisServer], bool]
    ) -> tuple[RedisServer, bytes] | None:
        """The server and the key of a block; ``None`` if no server of its places is ``usable``."""
        owners = self._owners or ()
        digits = name.hex().encode()
        for prefix in self._prefixes if owners else ():
            key = prefix + digits
            server = owners[binascii.crc_hqx(key, 0) % len(owners)]
            if server is not None and usable(server):
                return server, key
        return None

    def key(self, name: bytes, number: int = 0) -> bytes:
        """The key of a block in one of its places; it has no character that a pattern treats."""
        return self._prefixes[number] + name.hex().encode()

    def name(self, key: bytes) -> bytes | None:
        """The name of the block under a key; ``None`` for a key that is not this store's."""
        for prefix in self._prefixes:
            digits = key.removeprefix(prefix)
            if digits != key and _DIGITS.fullmatch(digits):
                return bytes.fromhex(digits.decode())
        return None

    def owners(self) -> list[RedisServer]:
        """Every server that owns slots."""
        return [server for server in dict.fromkeys(self._owners or ()) if server is not None]

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    def _ask_slots(self, deadline: Deadline) -> list[Address | None]:
        """The owner of each slot, by the first server that answers."""
        errors = []
        for address in self._known():
            try:
                # Half of the time left, so that a silent server does not take all of it.
                limit = deadline.earlier(deadline.remaining() / 2)
                return slots(address, self._settings, limit)
            except KvrelayError as error:
                errors.append(str(error))
        raise Unavailable(
            f"no server of {self._settings.url} answered CLUSTER SLOTS: {'; '.join(errors)}"
        )

    def _known(self) -> list[Address]:
        """The servers that are up as far as is known, then those of the URL."""
        with self._lock:
            up = [one.address for one in self._servers.values() if not one.breaker.open]
        return list(dict.fromkeys((*up, *self._settings.addresses)))

    def _update(self, addresses: list[Address | None]) -> None:
        owners = {address for address in addresses if address is not None}
        with self._lock:
            if self._closed:
                return
            old = self._servers
            self._servers = {a: old.get(a) or RedisServer(a, self._settings) for a in owners}
            self._owners = [None if a is None else self._servers[a] for a in addresses]
            removed = [server for address, server in old.items() if address not in owners]
        for server in removed:
            server.close()
        if owners != set(old):
            names = ", ".join(sorted(map(str, owners)))
            log.info("%s: blocks are kept by %s", self._settings.url, names)


_Entry = tuple[int, int, tuple[bytes, int]]
"""First and last slot and their owner; replicas, which follow, are ignored."""


def slots(address: Address, settings: RedisSettings, deadline: Deadline) -> list[Address | None]:
    """The owner of each slot, as the server at ``address`` reports it; ``Corrupt`` if invalid."""
    with library_client(address, settings, deadline) as client:
        reply = cast(Callable[[str], list[_Entry]], client.execute_command)("CLUSTER SLOTS")
    owners: list[Address | None] = [None] * SLOTS
    try:
        for start, end, (host, port, *_), *_ in reply:
            if not 0 <= start <= end < SLOTS:
                raise ValueError(f"slots {start} to {end}")
            # A server that reports no host is at the address that was asked.
            owner = Address(host.decode() if host else address.host, int(port))
            owners[start : end + 1] = [owner] * (end + 1 - start)
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt("slots", f"{address} reports invalid slots: {error}") from error
    return owners
