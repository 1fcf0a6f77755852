"""What lies in Redis, for those who look after it: keys by SCAN, headers by GETRANGE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import redis

from common.errors import NotFound
from kvblock.header import Header, decode, header_bytes, stated_count
from kvblock.name import NAME_BYTES
from kvstore.client.admin import Listed
from kvstore.redis.dialling import client
from kvstore.redis.node import Node, guarded
from kvstore.redis.settings import Settings
from kvstore.redis.topology import Topology
from rpc.deadline import Deadline

AT_ONCE = 500
SHORTEST = header_bytes(0)


class RedisAdmin:
    """A ``Browser``. Redis tells no leases, and not whether a block is partial."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._topology = settings, Topology(settings)

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[Listed]:
        """Every block under this store's prefix, in no order."""
        deadline, seen = Deadline.after(timeout), set[bytes]()
        pattern = f"{self._settings.prefix}:*{prefix.hex()}*"
        self._topology.prepare(deadline)
        for node in self._topology.owners():
            with guarded(node), client(node.address, self._settings, deadline) as library:
                for keys in _scanned(library, pattern, prefix, deadline):
                    for listed in _listed(library, keys):
                        if listed.name not in seen:
                            seen.add(listed.name)
                            yield listed
                            if len(seen) == limit:
                                return

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[Listed, Header]:
        """As the protocol says; wherever in a cluster the block lies."""
        deadline, asked = Deadline.after(timeout), set[Node]()
        self._topology.prepare(deadline)
        while (place := self._topology.place(name, lambda node: node not in asked)) is not None:
            node, key = place
            asked.add(node)
            with guarded(node), client(node.address, self._settings, deadline) as library:
                for listed in _listed(library, [key]):
                    head = library.getrange(key.decode(), 0, header_bytes(listed.tokens) - 1)
                    return listed, decode(cast(bytes, head))
        raise NotFound(f"there is no block {name.hex()}")

    def close(self) -> None:
        """Give up every connection."""
        self._topology.close()


def _scanned(
    library: redis.Redis, pattern: str, prefix: bytes, deadline: Deadline
) -> Iterator[list[bytes]]:
    cursor = 0
    while True:
        deadline.check("to list the store")
        cursor, found = library.scan(cursor, pattern, AT_ONCE)
        keys = cast("list[bytes]", found)
        yield [key for key in keys if (_name(key) or b"").startswith(prefix)]
        if not cursor:
            return


def _listed(library: redis.Redis, keys: Sequence[bytes]) -> Iterator[Listed]:
    """Those of ``keys`` that are blocks and still there."""
    with library.pipeline(transaction=False) as commands:
        for key in keys:
            commands.strlen(key)
            commands.getrange(key, 0, SHORTEST - 1)
        answers = cast("list[int | bytes]", commands.execute(raise_on_error=False))
    for key, size, head in zip(keys, answers[::2], answers[1::2], strict=True):
        name = _name(key)
        if name is None or not isinstance(size, int) or not isinstance(head, bytes):
            continue
        if size >= SHORTEST:
            tokens = stated_count(head)
            yield Listed(name, size, tokens, False, 0, "", memory=True, disk=False)


def _name(key: bytes) -> bytes | None:
    digits = key.rpartition(b":")[2].decode("ascii", "replace")
    try:
        name = bytes.fromhex(digits)
    except ValueError:
        return None
    return name if len(name) == NAME_BYTES else None
