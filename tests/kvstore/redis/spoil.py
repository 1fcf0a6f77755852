"""Ways in which a value in Redis is not the block that its key names."""

from __future__ import annotations

from collections.abc import Callable

from redis import Redis

from tests.kvstore.rig import make

Spoil = Callable[[bytes, Redis, bytes], None]
"""From the right value, a client and the key."""


def truncated(value: bytes, client: Redis, key: bytes) -> None:
    client.set(key, value[:50])


def flipped(value: bytes, client: Redis, key: bytes) -> None:
    client.set(key, value[:-1] + bytes([value[-1] ^ 1]))


def another_block(value: bytes, client: Redis, key: bytes) -> None:
    block = make()
    client.set(key, b"".join((block.header, block.payload)))


def too_long(value: bytes, client: Redis, key: bytes) -> None:
    client.set(key, value + bytes(100_000))


def of_another_type(value: bytes, client: Redis, key: bytes) -> None:
    client.delete(key)
    client.rpush(key, value)


def empty(value: bytes, client: Redis, key: bytes) -> None:
    client.set(key, b"")


WRONG: list[Spoil] = [truncated, flipped, another_block, too_long, of_another_type, empty]
