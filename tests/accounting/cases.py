"""The universes that are explored: 2 or 3 requests over 3 to 5 blocks, each with its own bait."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.engine.core.plan import EngineLimits
from tests.accounting.case import Case, order


def limits(blocks: int, size: int, seqs: int, budget: int, headroom: int) -> EngineLimits:
    return EngineLimits(blocks, size, 1000, seqs, budget, headroom)


ALL = (None, -3, 0, 1, 2, 3, 99)

SMALL = (
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
        "one prompt, two answers",
        limits(3, 2, 2, 3, 0),
        (order("a", b"\1\2\3", 3), order("b", b"\1\2\3", 3)),
        salts=(0, 1),
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
        "two that grow beside a load",
        limits(5, 1, 3, 3, 0),
        (order("a", b"\1\2", 3), order("b", b"\2", 3), order("c", b"\3\4\5", 1)),
        answers=(0, 99, None),
        shorts=(1, 99),
    ),
    Case(
        "a queue that is named in pieces",
        replace(limits(4, 1, 2, 3, 0), names_per_step=1),
        (order("a", b"\1\2\3", 2), order("b", b"\1\2", 2)),
        answers=(0, 99, None),
        shorts=(1, 99),
        lives=2,
    ),
)
LARGE = (
    Case(
        "three over five, one prefix",
        limits(5, 2, 3, 4, 1),
        (order("a", b"\1\2\3", 3), order("b", b"\1\2", 3), order("c", b"\1\2\3\4", 2)),
        salts=(0, 1, 2),
        lives=2,
    ),
    Case(
        "three that save, blocks of 1",
        limits(4, 1, 3, 3, 0),
        (
            order("a", b"\1\2", 3, save=True),
            order("b", b"\1", 3, save=True),
            order("c", b"\1\2", 3, prefill_only=True, save=True),
        ),
    ),
    Case(
        "three resumed, blocks of 3",
        limits(4, 3, 3, 5, 0),
        (
            order("a", b"\1\2\3", 6, made=2),
            order("b", b"\1\2\3\4", 5, made=1),
            order("c", b"\1\2\3", 4, stop_after=3),
        ),
        lives=2,
    ),
    Case(
        "two of three may be resident",
        limits(5, 2, 2, 3, 2),
        (
            order("a", b"\1\2\3", 5),
            order("b", b"\1\2\3", 5, made=1),
            order("c", b"\5", 4),
        ),
        lives=2,
        most=400_000,
    ),
    Case(
        "two that save and return",
        limits(4, 2, 2, 2, 0),
        (order("a", b"\1\2\3", 5, save=True), order("b", b"\1\2\3\4", 4, save=True)),
        lives=2,
    ),
)
# The same, each order once: small enough to be complete. What comes back for a second life meets
# the blocks that its first one left behind, which multiplies the states by ten and more.
ONCE = tuple(
    replace(case, name=f"{case.name}, once", lives=1, most=0)
    for case in LARGE
    if case.name in ("three over five, one prefix", "three resumed, blocks of 3")
)
CASES = (*SMALL, *ONCE, *LARGE)
