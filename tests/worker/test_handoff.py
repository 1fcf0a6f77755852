"""A handoff is accepted from the leg it was made for, and from no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.errors import KvrelayError, Mismatch, Rejected
from kvrelay.v1 import types_pb2
from kvrelay.worker.handoff import check_signature, check_tokens, sign

KEY, OTHER = b"k" * 32, b"o" * 32
SPACE = Namespace("m", "r", "float32", "layout", 4)
PROMPT = tuple(range(10, 21))


def leg(number: int, **other: object) -> types_pb2.Leg:
    made = types_pb2.Leg(
        request_id="request",
        prompt_token_ids=PROMPT,
        generation_id=7,
        leg_index=number,
        max_tokens=9,
    )
    for name, value in other.items():
        if name == "prompt_token_ids":
            del made.prompt_token_ids[:]
            made.prompt_token_ids.extend(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return made


def handed(tokens: int = len(PROMPT), key: bytes | None = KEY) -> types_pb2.Handoff:
    """By the prefill leg, which is the first."""
    namer = Namer(SPACE)
    names = namer.chain(PROMPT[:tokens], 4)
    last = names[-1] if names else namer.root
    if rest := PROMPT[len(names) * 4 : tokens]:
        last = namer.child(last, rest)
    return sign(key, leg(0), SPACE.digest, tokens, last)


def altered(handoff: types_pb2.Handoff, **fields: int | bytes) -> types_pb2.Handoff:
    made = types_pb2.Handoff()
    made.CopyFrom(handoff)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def check(
    handoff: types_pb2.Handoff, after: types_pb2.Leg | None = None, key: bytes | None = KEY
) -> None:
    after = leg(1) if after is None else after
    check_signature(key, after, SPACE.digest, handoff)
    check_tokens(Namer(SPACE), 4, tuple(after.prompt_token_ids), handoff)


@pytest.mark.parametrize("tokens", range(len(PROMPT) + 1))
def test_the_leg_it_was_made_for_takes_it(tokens: int) -> None:
    check(handed(tokens))
    check(types_pb2.Handoff())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "another"),
        ("generation_id", 8),
        ("leg_index", 0),
        ("leg_index", 2),
        ("prompt_token_ids", (*PROMPT[:-1], 99)),
        ("prompt_token_ids", (*PROMPT, 99)),
    ],
)
def test_another_leg_does_not(field: str, value: object) -> None:
    with pytest.raises(Mismatch, match=r"handoff\.signature"):
        check(handed(), leg(1, **{field: value}))


def test_another_tenant_does_not() -> None:
    mine = SPACE.of_tenant(b"s" * 32)
    with pytest.raises(Mismatch, match=r"handoff\.signature"):
        check_signature(KEY, leg(1), mine.digest, handed())


@pytest.mark.parametrize(
    "forge",
    [
        lambda h: altered(h, signature=b""),
        lambda h: altered(h, signature=bytes(32)),
        lambda h: altered(h, signature=h.signature[:31]),
        lambda h: altered(h, signature=h.signature + b"x"),
        lambda h: altered(h, signature=b"x" * (1 << 20)),
        lambda h: altered(h, saved_tokens=h.saved_tokens - 1),
        lambda h: altered(h, saved_tokens=(1 << 32) - 1),
        lambda h: altered(h, last_block_name=bytes(32)),
        lambda h: altered(h, last_block_name=h.last_block_name[:31]),
        lambda h: altered(h, last_block_name=h.last_block_name * 1000),
        lambda h: handed(key=OTHER),
        lambda h: handed(key=None),
    ],
)
def test_forged_cut_and_oversized_ones_are_refused(
    forge: Callable[[types_pb2.Handoff], types_pb2.Handoff],
) -> None:
    with pytest.raises((Mismatch, Rejected)):
        check(forge(handed()))


def test_every_bit_counts() -> None:
    whole = handed()
    for index in range(256):
        raw = bytearray(whole.signature)
        raw[index // 8] ^= 1 << index % 8
        with pytest.raises(Mismatch):
            check(altered(whole, signature=bytes(raw)))


def test_without_a_key_the_tokens_decide() -> None:
    check(handed(key=None), key=None)
    check(handed(key=KEY), key=None)
    with pytest.raises(KvrelayError, match=r"handoff\.last_block_name"):
        check(altered(handed(key=None), last_block_name=bytes(32)), key=None)
    with pytest.raises(Rejected, match=r"handoff\.saved_tokens"):
        check(altered(handed(key=None), saved_tokens=len(PROMPT) + 1), key=None)
