"""The universes that are explored: 2 or 3 requests over 3 to 5 blocks, each with its own bait."""

from __future__ import annotations

from engine.plan import Limits
from tests.accounting.case import Case, order


def limits(blocks: int, size: int, seqs: int, budget: int, headroom: int) -> Limits:
    return Limits(blocks, size, 1000, seqs, budget, headroom)


ALL = (None, -3, 0, 1, 2, 3, 99)

CASES = (
    Case(
        "one request, every answer",
        limits(3, 2, 2, 2, 1),
        (order("a", b"\1\2\3", 3, save=True),),
        answers=ALL,
        shorts=(-1, 0, 1, 2, 3, 99),
        lives=3,
    ),
    Case(
        "two of one prefix",
        limits(3, 2, 2, 3, 0),
        (order("a", b"\1\2\3", 3), order("b", b"\1\2\4", 2)),
        lives=2,
    ),
    Case(
        "two legs of one answer",
        limits(4, 2, 2, 2, 1),
        (
            order("p", b"\1\2\3", 3, prefill_only=True, save=True),
            order("d", b"\1\2\3", 3, made=1, save=True),
        ),
    ),
    Case(
        "blocks of one",
        limits(4, 1, 2, 2, 0),
        (order("a", b"\1\1", 3), order("b", b"\1", 3, stop_after=2)),
        lives=2,
    ),
    Case(
        "three over three",
        limits(3, 2, 3, 2, 0),
        (order("a", b"\1\2", 3), order("b", b"\1\2\3", 2), order("c", b"\4", 2)),
    ),
    Case(
        "three over five, headroom",
        limits(5, 2, 3, 4, 1),
        (order("a", b"\1\2\3", 3), order("b", b"\1\2", 3), order("c", b"\1\2\3\4", 2)),
        answers=(-3, 2, 99),
    ),
    Case(
        "three that save",
        limits(4, 1, 3, 3, 0),
        (
            order("a", b"\1\2", 2, save=True),
            order("b", b"\1", 3, save=True),
            order("c", b"\1\2", 2, prefill_only=True, save=True),
        ),
        answers=(-3, 1, 99),
        shorts=(0, 1, 99),
    ),
    Case(
        "two that are resumed",
        limits(4, 3, 2, 5, 0),
        (order("a", b"\1\2\3", 5, made=2), order("b", b"\1\2\3\4", 4, made=1)),
        lives=2,
    ),
)
