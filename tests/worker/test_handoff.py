"""A hand-off counts for the one leg it was made for, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.errors import KvrelayError, Mismatch, Rejected
from kvrelay.v1 import types_pb2
from kvrelay.worker.handoff import Handoff, check_signature, check_tokens, sign

KEY, OTHER = b"k" * 32, b"o" * 32
SPACE = Namespace("m", "r", "float32", "layout", 4)
PROMPT = tuple(range(10, 21))


def leg(number: int, **other: object) -> types_pb2.Leg:
    made = types_pb2.Leg(
        request_id="request", prompt_token_ids=PROMPT, generation=7, number=number, max_tokens=9
    )
    for name, value in other.items():
        if name == "prompt_token_ids":
            del made.prompt_token_ids[:]
            made.prompt_token_ids.extend(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return made


def handed(tokens: int = len(PROMPT), key: bytes | None = KEY) -> Handoff:
    """By the prefill leg, which is the first."""
    namer = Namer(SPACE)
    names = namer.chain(PROMPT[:tokens], 4)
    last = names[-1] if names else namer.root
    if rest := PROMPT[len(names) * 4 : tokens]:
        last = namer.child(last, rest)
    return sign(key, leg(0), SPACE.digest, tokens, last)


def check(handoff: Handoff, after: types_pb2.Leg | None = None, key: bytes | None = KEY) -> None:
    after = leg(1) if after is None else after
    check_signature(key, after, SPACE.digest, handoff)
    check_tokens(Namer(SPACE), 4, tuple(after.prompt_token_ids), handoff)


@pytest.mark.parametrize("tokens", range(len(PROMPT) + 1))
def test_the_leg_it_was_made_for_takes_it(tokens: int) -> None:
    check(handed(tokens))
    check(Handoff(0, b""))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "another"),
        ("generation", 8),
        ("number", 0),
        ("number", 2),
        ("prompt_token_ids", (*PROMPT[:-1], 99)),
        ("prompt_token_ids", (*PROMPT, 99)),
    ],
)
def test_another_leg_does_not(field: str, value: object) -> None:
    with pytest.raises(Mismatch, match="handoff_signature"):
        check(handed(), leg(**{"number": 1, field: value}))  # type: ignore[arg-type]


def test_another_tenant_does_not() -> None:
    mine = SPACE.of_tenant(b"s" * 32)
    with pytest.raises(Mismatch, match="handoff_signature"):
        check_signature(KEY, leg(1), mine.digest, handed())


@pytest.mark.parametrize(
    "forge",
    [
        lambda h: replace(h, signature=b""),
        lambda h: replace(h, signature=bytes(32)),
        lambda h: replace(h, signature=h.signature[:31]),
        lambda h: replace(h, signature=h.signature + b"x"),
        lambda h: replace(h, signature=b"x" * (1 << 20)),
        lambda h: replace(h, tokens=h.tokens - 1),
        lambda h: replace(h, tokens=(1 << 32) - 1),
        lambda h: replace(h, last_name=bytes(32)),
        lambda h: replace(h, last_name=h.last_name[:31]),
        lambda h: replace(h, last_name=h.last_name * 1000),
        lambda h: handed(key=OTHER),
        lambda h: handed(key=None),
    ],
)
def test_forged_cut_and_oversized_ones_are_refused(forge: Callable[[Handoff], Handoff]) -> None:
    with pytest.raises((Mismatch, Rejected)):
        check(forge(handed()))


def test_every_bit_counts() -> None:
    whole = handed()
    for index in range(256):
        raw = bytearray(whole.signature)
        raw[index // 8] ^= 1 << index % 8
        with pytest.raises(Mismatch):
            check(replace(whole, signature=bytes(raw)))


def test_without_a_key_the_tokens_decide() -> None:
    check(handed(key=None), key=None)
    check(handed(key=KEY), key=None)
    with pytest.raises(KvrelayError, match="handoff_last_name"):
        check(replace(handed(key=None), last_name=bytes(32)), key=None)
    with pytest.raises(Rejected, match="handoff_tokens"):
        check(replace(handed(key=None), tokens=len(PROMPT) + 1), key=None)
