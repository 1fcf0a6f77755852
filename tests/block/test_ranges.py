"""A reader of a header and a range of heads accepts what the writer wrote, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from kvrelay.block import ExpectedBlock, HeadRange
from kvrelay.block.header import checksum, checksums, encode_fields, seal
from kvrelay.block.mac import BlockKey
from kvrelay.errors import Corrupt, Rejected

KEY, OTHER = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
HEADS, LAYERS, TOKENS, DIM = 5, 3, (7, 8, 9), 4
BLOCK = ExpectedBlock(
    b"n" * 32, b"p" * 32, b"x" * 32, TOKENS, "bfloat16", (HEADS, LAYERS, 2, len(TOKENS), DIM)
)
HEAD = LAYERS * 2 * len(TOKENS) * DIM * 2
RANGES = [
    HeadRange(BLOCK, first, last) for first, last in itertools.combinations(range(HEADS + 1), 2)
]
KEYS = [None, KEY]


def payload_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(HEADS * HEAD)


def stored(payload: bytes, key: BlockKey | None) -> bytes:
    header = encode_fields(BLOCK, len(payload), None)
    return seal(header, payload, checksums(payload, HEADS), key) + payload


def parts(data: bytes, heads: HeadRange) -> tuple[bytes, bytes]:
    return data[: heads.header_length], data[heads.offset : heads.offset + heads.length]


def refused(heads: HeadRange, raw: bytes, part: bytes, key: BlockKey | None) -> Corrupt:
    with pytest.raises(Corrupt) as caught:
        heads.verify(raw, part, key)
    return caught.value


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("heads", RANGES)
def test_a_range_is_read_and_verified_without_the_others(
    heads: HeadRange, key: BlockKey | None
) -> None:
    payload = payload_of(1)
    raw, part = parts(stored(payload, key), heads)
    assert part == payload[heads.first * HEAD : heads.last * HEAD]
    heads.verify(raw, part, key)
    heads.verify(memoryview(bytearray(raw)), memoryview(bytearray(part)), key)


@pytest.mark.parametrize("key", KEYS)
def test_ranges_join_to_the_whole_payload(key: BlockKey | None) -> None:
    data = stored(payload_of(2), key)
    ranges = [HeadRange(BLOCK, 0, 2), HeadRange(BLOCK, 2, 4), HeadRange(BLOCK, 4, 5)]
    assert b"".join(parts(data, heads)[1] for heads in ranges) == payload_of(2)


@pytest.mark.parametrize("key", KEYS)
def test_a_flipped_bit_of_a_range_names_its_head_and_no_other_range_sees_it(
    key: BlockKey | None,
) -> None:
    data = bytearray(stored(payload_of(3), key))
    for head in range(HEADS):
        changed = bytearray(data)
        changed[HeadRange(BLOCK, head, HEADS).offset + 11] ^= 4
        for heads in RANGES:
            raw, part = parts(bytes(changed), heads)
            if heads.first <= head < heads.last:
                error = refused(heads, raw, part, key)
                assert (error.field, f"head {head}:" in str(error)) == ("payload_checksum", True)
            else:
                heads.verify(raw, part, key)


@pytest.mark.parametrize("key", KEYS)
def test_every_bit_of_the_header_is_covered_also_the_seals_of_other_heads(
    key: BlockKey | None,
) -> None:
    heads = HeadRange(BLOCK, 1, 2)
    raw, part = parts(stored(payload_of(4), key), heads)
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        refused(heads, bytes(changed), part, key)
        if key is not None and not 16 <= position < 24:  # nor with a right checksum of the header
            own = checksum(bytes(changed[:16] + changed[24:])).to_bytes(8, "little")
            refused(heads, bytes(changed[:16]) + own + bytes(changed[24:]), part, key)


def test_heads_cannot_be_moved_to_another_place_or_block() -> None:
    """The tag of a head is the same wherever it is; the header's tag binds it to its place."""
    heads = HeadRange(BLOCK, 1, 2)
    payload, other = payload_of(5), payload_of(6)
    raw, part = parts(stored(payload, KEY), heads)
    others = stored(other, KEY)
    moved = HeadRange(BLOCK, 2, 3)
    assert refused(heads, raw, parts(stored(payload, KEY), moved)[1], KEY).field
    assert refused(heads, raw, parts(others, heads)[1], KEY).field
    seals = slice(192 + 24, 192 + 48)  # those of head 1
    mixed = raw[: seals.start] + others[seals] + raw[seals.stop :]
    mixed = mixed[:16] + checksum(mixed[:16] + mixed[24:]).to_bytes(8, "little") + mixed[24:]
    assert refused(heads, mixed, parts(others, heads)[1], KEY).field == "tag"
    assert refused(heads, mixed, part, KEY).field == "tag"


@pytest.mark.parametrize("maker", [None, OTHER])
def test_a_range_that_a_stranger_wrote_is_refused(maker: BlockKey | None) -> None:
    heads = HeadRange(BLOCK, 0, 3)
    raw, part = parts(stored(payload_of(7), maker), heads)
    assert refused(heads, raw, part, KEY).field == "tag"
    signed, part = parts(stored(payload_of(7), KEY), heads)
    assert refused(heads, signed, part, None).field == "tag"


def test_a_head_of_equal_checksum_is_refused() -> None:
    """XXH3 is no protection, so a forged head is given here with the checksum that is stated."""
    heads = HeadRange(BLOCK, 1, 3)
    raw, part = parts(stored(payload_of(8), KEY), heads)
    forged = bytes(reversed(part))
    sums = list(checksums(payload_of(8), HEADS))
    sums[1:3] = checksums(forged, 2)
    lie = encode_fields(BLOCK, HEADS * HEAD, sums)
    assert refused(heads, lie, forged, KEY).field == "tag"
    assert refused(heads, raw, forged, KEY).field == "payload_checksum"


def test_another_block_and_other_lengths_are_refused() -> None:
    heads = HeadRange(BLOCK, 1, 3)
    raw, part = parts(stored(payload_of(9), KEY), heads)
    for field, value in {"name": b"y" * 32, "tokens": (7, 8, 1), "dtype": "float16"}.items():
        wanted = dataclasses.replace(BLOCK, **{field: value})  # type: ignore[arg-type]
        assert refused(HeadRange(wanted, 1, 3), raw, part, KEY).field == field
    for size in (0, 1, heads.length - 1, heads.length + 1):
        assert refused(heads, raw, bytes(size), KEY).field == "payload_bytes"
    for size in range(len(raw)):
        refused(heads, raw[:size], part, KEY)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (0, HEADS + 1)])
def test_a_range_outside_the_block_is_rejected(first: int, last: int) -> None:
    with pytest.raises(Rejected, match="heads"):
        HeadRange(BLOCK, first, last)
