"""The tag of a block: only a holder of the fleet's key makes one that others accept."""

from __future__ import annotations

import random
import struct
import sys

import pytest

from kvrelay.block.header import (
    ExpectedBlock,
    checksum,
    checksums,
    decode,
    encode_fields,
    seal,
)
from kvrelay.block.mac import BlockKey
from kvrelay.block.verify import verify_block, verify_tag
from kvrelay.errors import Corrupt

KEY, OTHER = BlockKey(b"k" * 32), BlockKey(b"o" * 32)
HEADS = 4
PAYLOAD = bytes(range(256)) * 16
WANTED = ExpectedBlock(
    b"n" * 32, b"p" * 32, b"x" * 32, (1, 2, 3), "uint8", (HEADS, len(PAYLOAD) // HEADS)
)


def block(payload: bytes = PAYLOAD, key: BlockKey | None = KEY) -> bytes:
    return seal(encode_fields(WANTED, len(payload), None), payload, checksums(payload, HEADS), key)


def refused(raw: bytes, payload: bytes, key: BlockKey | None = KEY) -> str:
    with pytest.raises(Corrupt) as caught:
        verify_block(raw, WANTED, payload, None, key)
    return caught.value.field


def test_a_member_accepts_what_a_member_wrote() -> None:
    verify_block(block(), WANTED, PAYLOAD, None, KEY)
    verify_block(block(), WANTED, memoryview(bytearray(PAYLOAD)), checksums(PAYLOAD, HEADS), KEY)
    verify_tag(block(), PAYLOAD, KEY)
    verify_block(block(key=None), WANTED, PAYLOAD)
    assert decode(block()).checksums == checksums(PAYLOAD, HEADS)


def test_a_right_tag_proves_the_payload_without_its_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def summed(data: object, heads: int) -> tuple[int, ...]:
        raise AssertionError("a second pass over the payload")

    monkeypatch.setattr(sys.modules[verify_block.__module__], "checksums", summed)
    verify_block(block(), WANTED, PAYLOAD, None, KEY)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("known", [False, True])
def test_a_flipped_bit_is_told_by_its_field(key: BlockKey | None, known: bool) -> None:
    """``known``: the checksum of what came was computed on the way."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    raw = block(key=key)
    fields = {
        range(8): {"magic"},
        range(8, 10): {"version"},
        range(12, 16): {"header_length"},
        range(10, 11): {"header_checksum", "shape"},
        range(52, 56): {"count", "header_length", "header_checksum"},  # as many as are then read
        range(168, 172): {"shape", "header_length", "header_checksum"},  # the number of heads
    }
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << source.randrange(8)
        named = next((f for held, f in fields.items() if position in held), {"header_checksum"})
        with pytest.raises(Corrupt) as caught:
            verify_block(
                changed, WANTED, PAYLOAD, checksums(PAYLOAD, HEADS) if known else None, key
            )
        assert caught.value.field in named, position
    for _ in range(300):
        payload = bytearray(PAYLOAD)
        payload[source.randrange(len(payload))] ^= 1 << source.randrange(8)
        with pytest.raises(Corrupt, match="payload_checksum"):
            verify_block(raw, WANTED, payload, checksums(payload, HEADS) if known else None, key)
    with pytest.raises(Corrupt, match="payload_bytes"):
        verify_block(raw, WANTED, PAYLOAD[:-1], None, key)
    for short in range(0, len(raw), 7):
        with pytest.raises(Corrupt, match="header"):
            verify_block(raw[:short], WANTED, PAYLOAD, None, key)


def test_a_proof_is_of_one_key_and_one_name() -> None:
    assert KEY.proof(b"x" * 32) == BlockKey(b"k" * 32).proof(b"x" * 32)
    proofs = {KEY.proof(b"x" * 32), KEY.proof(b"y" * 32), OTHER.proof(b"x" * 32)}
    assert len(proofs) == 3
    assert not {KEY.head_tag(b"x" * 32), KEY.header_tag(b"x" * 32)} & proofs


@pytest.mark.parametrize("maker", [None, OTHER])
def test_what_a_stranger_wrote_is_refused(maker: BlockKey | None) -> None:
    assert refused(block(key=maker), PAYLOAD) == "tag"
    with pytest.raises(Corrupt, match="tag"):
        verify_tag(block(key=maker), PAYLOAD, KEY)


def test_a_signed_block_is_not_an_unsigned_one() -> None:
    assert refused(block(), PAYLOAD, None) == "tag"


def test_a_payload_of_equal_checksum_is_refused() -> None:
    """XXH3 is no protection: who may write can keep a real block's header and forge its payload.

    A collision costs an attacker little, so here the checksum is simply given as equal.
    """
    forged = bytes(reversed(PAYLOAD))
    with pytest.raises(Corrupt, match="tag"):
        verify_block(block(), WANTED, forged, checksums(PAYLOAD, HEADS), KEY)
    raw = seal(block(), forged, checksums(PAYLOAD, HEADS), None)
    with pytest.raises(Corrupt, match="tag"):
        verify_block(raw, WANTED, forged, checksums(PAYLOAD, HEADS), KEY)


def test_every_bit_of_header_and_payload_is_covered() -> None:
    """Whoever changes a bit can make both checksums right again, and not the tag."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    raw = block()
    for position in range(len(raw)):
        if 16 <= position < 24:  # the header's own checksum, made again below
            continue
        changed = bytearray(raw)
        changed[position] ^= 1 << source.randrange(8)
        rest = bytes(changed[24:])
        summed = checksum(bytes(changed[:16]) + rest)
        lie = bytes(changed[:16]) + summed.to_bytes(8, "little") + rest
        refused(lie, PAYLOAD)
    for _ in range(500):
        payload = bytearray(PAYLOAD)
        payload[source.randrange(len(payload))] ^= 1 << source.randrange(8)
        lie = seal(raw, payload, checksums(payload, HEADS), None)
        lie = lie[:32] + raw[32:48] + lie[48:]  # with the tags of the real block
        for seal_of in range(192, 192 + 24 * HEADS, 24):
            lie = lie[: seal_of + 8] + raw[seal_of + 8 : seal_of + 24] + lie[seal_of + 24 :]
        own = checksum(lie[:16] + lie[24:])
        assert refused(lie[:16] + struct.pack("<Q", own) + lie[24:], bytes(payload)) == "tag"


def test_a_payload_that_grows_by_zeros_has_another_tag() -> None:
    header = b"h" * 100
    lengths = [0, 1, 15, 16, 17, 4096]
    assert len({KEY.head_tag(bytes(length)) for length in lengths}) == len(lengths)
    assert KEY.head_tag(header) == KEY.head_tag(header) != KEY.header_tag(header)
    assert KEY.header_tag(header) == KEY.header_tag(header) != KEY.header_tag(header + b"h")
    assert "k" * 8 not in repr(KEY)
