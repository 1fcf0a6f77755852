"""What lies in Redis, for those who look after it: keys by SCAN, headers by GETRANGE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import redis

from kvrelay.block.header import Header, decode, header_bytes, stated_count
from kvrelay.errors import Corrupt, NotFound
from kvrelay.rpc.deadline import Deadline
from kvstore.client.admin import ListedBlock
from kvstore.redis.call import NO_VALUE
from kvstore.redis.dialling import library_client
from kvstore.redis.server import RedisServer, recorded
from kvstore.redis.settings import RedisSettings
from kvstore.redis.topology import Topology

AT_ONCE = 500
SHORTEST = header_bytes(0)


class RedisBrowser:
    """A ``Browser``. Redis tells no leases, and not whether a block is partial."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._topology = Topology(settings)

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """Every block under this store's prefix, in no order."""
        deadline, seen = Deadline.after(timeout), set[bytes]()
        pattern = f"{self._settings.prefix}:*{prefix.hex()}*"
        self._topology.prepare(deadline)
        for node in self._topology.owners():
            with recorded(node), library_client(node.address, self._settings, deadline) as library:
                for keys in _scanned(library, pattern, deadline):
                    for listed in self._listed(library, keys, prefix):
                        if listed.name not in seen:
                            seen.add(listed.name)
                            yield listed
                            if len(seen) == limit:
                                return

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        """As the protocol says; wherever in a cluster the block lies."""
        deadline, asked = Deadline.after(timeout), set[RedisServer]()
        self._topology.prepare(deadline)
        while (place := self._topology.place(name, lambda node: node not in asked)) is not None:
            node, key = place
            asked.add(node)
            with recorded(node), library_client(node.address, self._settings, deadline) as library:
                for listed in self._listed(library, [key]):
                    if not listed.size:
                        raise Corrupt("type", f"what lies under {key.decode()} is no string")
                    head = library.getrange(key.decode(), 0, header_bytes(listed.tokens) - 1)
                    return listed, decode(cast(bytes, head))
        raise NotFound(f"there is no block {name.hex()}")

    def close(self) -> None:
        """Give up every connection."""
        self._topology.close()

    def _listed(
        self, library: redis.Redis, keys: Sequence[bytes], prefix: bytes = b""
    ) -> Iterator[ListedBlock]:
        """What lies under those of ``keys`` that are called after a block, whatever it is.

        What is no value at all, a list for one, is listed with 0 bytes.
        """
        named = [(key, name) for key in keys if (name := self._topology.name(key)) is not None]
        named = [(key, name) for key, name in named if name.startswith(prefix)]
        with library.pipeline(transaction=False) as commands:
            for key, _ in named:
                commands.strlen(key)
                commands.getrange(key, 0, SHORTEST - 1)
            answers = commands.execute(raise_on_error=False)
        for (_, name), size, head in zip(named, answers[::2], answers[1::2], strict=True):
            if isinstance(size, redis.ResponseError) and str(size).startswith(NO_VALUE):
                size, head = 0, b"-"
            if isinstance(size, int) and isinstance(head, bytes) and head:
                yield ListedBlock(
                    name, size, stated_count(head), False, 0, "", memory=True, disk=False
                )


def _scanned(library: redis.Redis, pattern: str, deadline: Deadline) -> Iterator[list[bytes]]:
    cursor = 0
    while True:
        deadline.check("to list the store")
        cursor, found = library.scan(cursor, pattern, AT_ONCE)
        yield cast("list[bytes]", found)
        if not cursor:
            return
