"""What tests of stores share: blocks, puts, gets and lookups, and the service's memory."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from kvrelay.block.header import (
    SHORTEST,
    Header,
    checksums,
    decode,
    encode,
    seal,
    stated_length,
)
from kvrelay.block.mac import BlockKey
from kvrelay.block.name import child_name
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt, KvrelayError
from kvrelay.usage import Miss
from kvstore import Block, GetResult, Offer, PutStatus, Store, Tail, Want
from kvstore.base import NameQuery
from kvstore.redis import RedisStore, settings_of
from kvstore.urls import query_parameters

TIMEOUT = 10.0


class PausedClock:
    """``time.monotonic``, which stands still until ``go_on``."""

    def __init__(self) -> None:
        self._paused: float | None = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() if self._paused is None else self._paused

    def go_on(self) -> None:
        self._paused = None


def make(
    size: int = 4096, like: Block | None = None, count: int = 4, parent: bytes | None = None
) -> Block:
    """A block with random payload, after a random parent unless told; or the name of ``like``."""
    payload, space, tokens = os.urandom(size), b"n" * 32, tuple(range(count))
    heads = 4 if size % 4 == 0 else 1
    parent = decode(like.header).parent if like else parent or os.urandom(32)
    header = Header(
        namespace=space,
        parent=parent,
        name=child_name(space, parent, tokens),
        tokens=tokens,
        dtype="uint8",
        shape=(heads, size // heads),
        payload_bytes=size,
        checksums=checksums(payload, heads),
    )
    return Block(encode(header), memoryview(payload))


def sealed(block: Block, key: BlockKey) -> Block:
    """The block, signed by the fleet with this key."""
    summed = decode(block.header).checksums
    return Block(seal(block.header, block.payload, summed, key), block.payload)


def name_of(block: Block) -> bytes:
    return decode(block.header).name


def offer(block: Block, name: bytes | None = None) -> Offer:
    return Offer(name or name_of(block), block.size, False, lambda: block)


def chain(count: int, size: int) -> list[Offer]:
    """Offers of blocks each of which continues the one before; the first begins a sequence."""
    offers: list[Offer] = []
    for _ in range(count):
        block = make(size, parent=offers[-1].name if offers else None)
        first, parent = None if offers else 1, decode(block.header).parent
        offers.append(replace(offer(block), first_block_hash=first, parent=parent))
    return offers


def put(store: Store, *blocks: Block) -> list[PutStatus]:
    outcomes = store.put([offer(block) for block in blocks], TIMEOUT)
    return [outcome.status for outcome in outcomes]


def get(store: Store, *blocks: Block) -> list[GetResult]:
    """Gets blocks of these names and lengths; checks the bytes of those that came."""
    wants = [
        Want(name_of(b), memoryview(bytearray(b.payload.nbytes)), heads=b.heads) for b in blocks
    ]
    gots = list(store.get(wants, TIMEOUT))
    assert [got.index for got in gots] == list(range(len(blocks)))
    for got, want, block in zip(gots, wants, blocks, strict=True):
        if got.header is not None:
            assert got.header == block.header
            assert want.buffer == block.payload
            assert got.summed in (None, decode(got.header).checksums)
            verify_payload(decode(got.header), want.buffer)
    return gots


def present(store: Store, *blocks: Block) -> list[bool]:
    return [store.lookup(NameQuery([name_of(b)]), TIMEOUT).lead == 1 for b in blocks]


def why(
    store: Store, *names: bytes, tails: Sequence[Tail] = (), first_block_hashes: Sequence[int] = ()
) -> Miss | None:
    return store.lookup(
        NameQuery(list(names), tails, first_block_hashes=first_block_hashes), TIMEOUT
    ).missing


def address_of(url: str) -> str:
    return url.removeprefix("kvrelay://")


def arena_in(process: subprocess.Popen[str]) -> int:
    """Address of the arena in the store's process."""
    with open(f"/proc/{process.pid}/maps", encoding="ascii") as maps:
        line = next(line for line in maps if "kvrelay-arena" in line)
    return int(re.split("[- ]", line)[0], 16)


def copied(source: Store, target: Store, name: bytes) -> bool:
    """Whether a block of one store is in another now."""
    (size,) = source.survey(NameQuery([name]), TIMEOUT).sizes
    if size is None:
        return False
    for header in range(SHORTEST, size, 128):  # as long as its tokens and heads need
        buffer = memoryview(bytearray(size - header))
        (got,) = source.get([Want(name, buffer)], TIMEOUT)
        if got.header is not None and stated_length(got.header) == len(got.header):
            return put(target, Block(got.header, buffer))[0] in (
                PutStatus.STORED,
                PutStatus.EXISTED,
            )
    return False


def open_store(url: str) -> RedisStore:
    parts = urlsplit(url)
    return RedisStore(settings_of(parts, query_parameters(parts.query)))


def accepted(
    store: Store, blocks: Sequence[Block], timeout: float = 3.0, *failing: type[KvrelayError]
) -> tuple[int, int]:
    """How many of ``blocks`` come and are right, and how many it refuses; ``failing`` ends it."""
    wants = [
        Want(name_of(b), memoryview(bytearray(b.payload.nbytes)), heads=b.heads) for b in blocks
    ]
    taken = refused = 0
    with suppress(*failing):
        for got in store.get(wants, timeout):
            if got.header is None:
                continue
            try:
                header = decode(got.header)
                if header != decode(blocks[got.index].header):
                    raise Corrupt("header", "another block")
                verify_payload(header, wants[got.index].buffer, got.summed)
            except Corrupt:
                refused += 1
                continue
            taken += 1
            assert wants[got.index].buffer == blocks[got.index].payload
    return taken, refused
