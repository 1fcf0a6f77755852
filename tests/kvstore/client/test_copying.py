"""Copies and receptions with checksums: every byte once, in order, and each head summed."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from kvrelay.block.header import checksums
from kvstore.wire.copying import HASH_CHUNK, copy_summed, receive_block

SIZES = [
    (heads, heads * head)
    for heads, head in (
        (1, 0),
        (8, 0),
        (1, 1),
        (256, 1),
        (3, 7),
        (1, HASH_CHUNK),
        (1, HASH_CHUNK + 1),
        (2, HASH_CHUNK),
        (3, HASH_CHUNK - 1),
        (2, 3 * HASH_CHUNK + 5),
        (8, HASH_CHUNK // 4),
        (7, HASH_CHUNK // 3 + 1),
        (128, 12_345),
    )
]


@pytest.mark.parametrize(("heads", "size"), SIZES)
def test_a_copy_has_the_bytes_and_the_checksums_of_its_heads(heads: int, size: int) -> None:
    source, target = os.urandom(size), bytearray(size)
    assert copy_summed(memoryview(target), memoryview(source), heads) == checksums(source, heads)
    assert target == source


def test_a_copy_of_another_length_is_an_error() -> None:
    for size in (7, 9, 2 * HASH_CHUNK):
        with pytest.raises(ValueError, match="do not fill 8"):
            copy_summed(memoryview(bytearray(8)), memoryview(bytes(size)), 2)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("heads", "size"), SIZES)
def test_a_block_is_received_in_order(heads: int, size: int, summed: bool) -> None:
    """Header first; no call is asked for more than a chunk of payload."""
    sent = os.urandom(300 + size)
    header, payload = bytearray(300), bytearray(size)
    at = 0

    def receive(buffers: Sequence[memoryview]) -> None:
        nonlocal at
        assert len(buffers[-1]) <= HASH_CHUNK
        for buffer in buffers:
            buffer[:] = sent[at : at + len(buffer)]
            at += len(buffer)

    found = receive_block(receive, memoryview(header), memoryview(payload), heads * summed)
    assert bytes(header + payload) == sent
    assert found == (checksums(payload, heads) if summed else None)


def test_random_lengths_that_are_no_multiple_of_the_heads() -> None:
    """No block has one, and a buffer of a wrong length must be filled all the same."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(40):
        heads, size = source.randint(1, 256), source.randint(0, 3 * HASH_CHUNK)
        data, target = source.randbytes(size), bytearray(size)
        copy_summed(memoryview(target), memoryview(data), heads)
        assert target == data
