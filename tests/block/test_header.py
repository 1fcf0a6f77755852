"""The header: what goes in comes out, and no changed byte goes unseen."""

from __future__ import annotations

import dataclasses
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.block.header import (
    ALIGNMENT,
    MAX_HEADS,
    ExpectedBlock,
    Header,
    checksums,
    decode,
    encode,
    header_bytes,
    payload_bytes,
)
from kvrelay.block.verify import verify, verify_payload
from kvrelay.errors import Corrupt

PAYLOAD = bytes(range(256)) * 3
HEADER = Header(
    namespace=b"n" * 32,
    parent=b"p" * 32,
    name=b"x" * 32,
    tokens=tuple(range(100, 106)),
    dtype="float32",
    shape=(2, 2, 6, 4, 2),
    payload_bytes=len(PAYLOAD),
    checksums=checksums(PAYLOAD, 2),
)
WANTED = ExpectedBlock(b"n" * 32, b"p" * 32, b"x" * 32, HEADER.tokens, "float32", HEADER.shape)


@given(
    heads=st.integers(1, MAX_HEADS),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300).map(tuple),
    shape=st.lists(st.integers(0, 9), max_size=5).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)
def test_round_trip(
    tokens: tuple[int, ...], heads: int, shape: tuple[int, ...], dtype: str
) -> None:
    shape = (heads, *shape)
    header = dataclasses.replace(
        HEADER,
        tokens=tokens,
        shape=shape,
        dtype=dtype,
        payload_bytes=payload_bytes(dtype, shape),
        checksums=tuple(range(heads)),
    )
    data = encode(header)
    assert len(data) == header.length == header_bytes(len(tokens), heads)
    assert len(data) % ALIGNMENT == 0
    assert decode(data) == header
    assert decode(memoryview(data + b"payload")) == header


def test_every_bit_flip_of_every_byte_is_seen() -> None:
    data = bytearray(encode(HEADER))
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                decode(data)
            data[position] ^= 1 << bit
    assert decode(data) == HEADER


def test_every_shorter_header_is_refused() -> None:
    data = encode(HEADER)
    for length in range(len(data)):
        with pytest.raises(Corrupt, match="header"):
            decode(data[:length])


@pytest.mark.parametrize(
    ("offset", "layout", "value", "field"),
    [
        (0, "8s", b"NOTABLOK", "magic"),
        (8, "H", 2, "version"),
        (12, "I", 0xFFFFFFFF, "header_length"),
        (52, "I", 0xFFFFFFFF, "count"),
        (10, "B", 0, "shape"),
        (168, "I", 0, "shape"),
        (168, "I", MAX_HEADS + 1, "shape"),
        (168, "I", 40, "header_length"),
        (64, "32s", b"m" * 32, "header_checksum"),
    ],
)
def test_the_field_is_named(offset: int, layout: str, value: bytes | int, field: str) -> None:
    data = bytearray(encode(HEADER))
    struct.pack_into("<" + layout, data, offset, value)
    with pytest.raises(Corrupt) as caught:
        decode(data)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "complex"}, "dtype"),
        ({"payload_bytes": 767}, "payload_bytes"),
        ({"shape": (2, 1 << 31, 1 << 31)}, "payload_bytes"),
        ({"shape": (2, 1 << 28), "payload_bytes": 1 << 31}, "payload_bytes"),
    ],
)
def test_a_well_checksummed_lie_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(Corrupt) as caught:
        decode(encode(dataclasses.replace(HEADER, **change)))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_what_was_wanted_verifies() -> None:
    verify(HEADER, WANTED)
    verify_payload(HEADER, PAYLOAD)
    verify_payload(HEADER, memoryview(bytearray(PAYLOAD)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"namespace": b"o" * 32}, "namespace"),
        ({"parent": b"o" * 32}, "parent"),
        ({"name": b"o" * 32}, "name"),
        ({"tokens": HEADER.tokens[:-1]}, "count"),
        ({"tokens": (*HEADER.tokens[:-1], 7)}, "tokens"),
        ({"dtype": "int8"}, "dtype"),
        ({"shape": (2, 2, 6, 2, 4)}, "shape"),
    ],
)
def test_the_differing_field_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(Corrupt) as caught:
        verify(HEADER, dataclasses.replace(WANTED, **change))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_flipped_payload_bytes_are_seen() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    payload = bytearray(PAYLOAD)
    for _ in range(1000):
        position, mask = source.randrange(len(payload)), source.randrange(1, 256)
        payload[position] ^= mask
        with pytest.raises(Corrupt, match="payload_checksum"):
            verify_payload(HEADER, payload)
        payload[position] ^= mask
    with pytest.raises(Corrupt, match="payload_bytes"):
        verify_payload(HEADER, payload[:-1])
