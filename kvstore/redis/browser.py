"""The blocks in Redis, for operators: keys by SCAN, headers by GETRANGE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import redis

from kvrelay.block.header import LONGEST, SHORTEST, Header, decode, stated_count
from kvrelay.errors import Corrupt, NotFound
from kvrelay.rpc.deadline import Deadline
from kvstore.base import ListedBlock
from kvstore.redis.call import WRONG_TYPE
from kvstore.redis.connection import library_client
from kvstore.redis.server import RedisServer
from kvstore.redis.settings import RedisSettings
from kvstore.redis.topology import Topology

SCAN_COUNT = 500


class RedisBrowser:
    """A ``StoreBrowser``. Redis has no leases, and does not know which blocks are partial."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._topology = Topology(settings)

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """Every block under this store's prefix, in no order."""
        deadline = Deadline.after(timeout)
        seen: set[bytes] = set()
        pattern = f"{self._settings.prefix}:*{prefix.hex()}*"
        self._topology.prepare(deadline)
        for server in self._topology.owners():
            with self._client(server, deadline) as client:
                for keys in _scan(client, pattern, deadline):
                    for listed in self._listed(client, keys, prefix):
                        if listed.name not in seen:
                            seen.add(listed.name)
                            yield listed
                            if len(seen) == limit:
                                return

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        """Looks in every place of the block."""
        deadline = Deadline.after(timeout)
        asked: set[RedisServer] = set()
        self._topology.prepare(deadline)
        while (place := self._topology.place(name, lambda server: server not in asked)) is not None:
            server, key = place
            asked.add(server)
            with self._client(server, deadline) as client:
                for listed in self._listed(client, [key]):
                    if not listed.size:
                        raise Corrupt("type", f"the value of {key.decode()} is no string")
                    head = client.getrange(key.decode(), 0, LONGEST - 1)
                    return listed, decode(cast(bytes, head))
        raise NotFound(f"there is no block {name.hex()}")

    def close(self) -> None:
        self._topology.close()

    @contextmanager
    def _client(self, server: RedisServer, deadline: Deadline) -> Iterator[redis.Redis]:
        with (
            server.breaker.recorded(),
            library_client(server.address, self._settings, deadline) as client,
        ):
            yield client

    def _listed(
        self, client: redis.Redis, keys: Sequence[bytes], prefix: bytes = b""
    ) -> Iterator[ListedBlock]:
        """The values under those of ``keys`` that are named after a block.

        A value that is no string, a list for example, is listed with 0 bytes.
        """
        named = [(key, name) for key in keys if (name := self._topology.name(key)) is not None]
        named = [(key, name) for key, name in named if name.startswith(prefix)]
        with client.pipeline(transaction=False) as commands:
            for key, _ in named:
                commands.strlen(key)
                commands.getrange(key, 0, SHORTEST - 1)
            answers = commands.execute(raise_on_error=False)
        for (_, name), size, head in zip(named, answers[::2], answers[1::2], strict=True):
            if isinstance(size, redis.ResponseError) and str(size).startswith(WRONG_TYPE):
                size = 0
                head = b"-"
            if isinstance(size, int) and isinstance(head, bytes) and head:
                yield ListedBlock(
                    name, size, stated_count(head), False, 0, "", memory=True, disk=False
                )


def _scan(client: redis.Redis, pattern: str, deadline: Deadline) -> Iterator[list[bytes]]:
    cursor = 0
    while True:
        deadline.check("to list the store")
        cursor, keys = client.scan(cursor, pattern, SCAN_COUNT)
        yield cast("list[bytes]", keys)
        if not cursor:
            return
