"""Why blocks went, as far back as is remembered."""

from __future__ import annotations

import hashlib
import os
import tracemalloc

import pytest

from kvrelay.block.name import FAMILY_MASK
from kvrelay.usage import Miss
from kvstore.base import SurveyResult, Tail
from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction.policy import LeastRecentlyUsed
from kvstore.index.tombstones import MAX_TOMBSTONES, Tombstones
from kvstore.multi.union import united

A, B, C, D = (hashlib.sha256(word).digest() for word in (b"a", b"b", b"c", b"d"))


def test_the_newest_are_remembered_with_their_last_reason() -> None:
    tombstones = Tombstones(limit=2)
    for name, why in ((A, Miss.EVICTED), (B, Miss.EXPIRED), (A, Miss.CLEARED), (C, Miss.EVICTED)):
        tombstones.removed(name, None, why)
    assert [tombstones.reason([name], []) for name in (A, B, C)] == [
        Miss.CLEARED,
        Miss.NEVER_STORED,
        Miss.EVICTED,
    ]
    assert len(tombstones) == 2


def test_an_opening_counts_while_one_block_of_it_is_there() -> None:
    """Another model is known by the upper bits of the hash, another numeric profile by all."""
    tombstones, other_model = Tombstones(), 5 ^ FAMILY_MASK
    tombstones.added(5)
    tombstones.added(5)
    tombstones.removed(A, 5, Miss.EVICTED)
    assert tombstones.reason([B], [5]) is Miss.OTHER_NUMERICS
    assert tombstones.reason([B], [other_model]) is Miss.OTHER_NAMESPACE
    tombstones.added(other_model)
    tombstones.removed(C, 5, Miss.EVICTED)
    assert tombstones.reason([B], [5]) is Miss.OTHER_NAMESPACE
    assert tombstones.reason([B], [5, other_model]) is Miss.OTHER_NUMERICS
    tombstones.removed(B, other_model, Miss.EVICTED)
    assert tombstones.reason([D], [5, other_model]) is Miss.NEVER_STORED
    assert tombstones.reason([A], [5]) is Miss.EVICTED


def test_a_full_memory_takes_what_is_said_of_it() -> None:
    tracemalloc.start()
    try:
        tombstones = Tombstones()
        for _ in range(MAX_TOMBSTONES + 1000):
            tombstones.removed(os.urandom(32), None, Miss.EVICTED)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(f"{taken / 2**20:.1f} MiB")
    assert MAX_TOMBSTONES * 0.99 < len(tombstones) <= MAX_TOMBSTONES
    assert taken < 6 << 20


def test_a_partial_block_whose_life_is_over_has_expired() -> None:
    index: BlockIndex[str] = BlockIndex(IndexOptions(100, 10.0, b"boot"), LeastRecentlyUsed())
    grant = index.reserve([Claim(A, 10, True)], 5.0, 0.0)
    assert index.lookup([], [Tail(0, A)], 0.0, 0.0).missing is Miss.TOO_LATE
    assert grant.ticket is not None
    index.commit(grant.ticket, A, "A", 0.0)
    assert index.lookup([], [Tail(0, A)], 0.0, 5.0).missing is None
    assert index.lookup([], [Tail(0, A)], 0.0, 11.0).missing is Miss.EXPIRED
    assert index.lookup([B], [Tail(0, A)], 0.0, 11.0).missing is Miss.EXPIRED
    assert index.lookup([B], [], 0.0, 11.0).missing is Miss.NEVER_STORED


@pytest.mark.parametrize(
    ("near", "far", "known", "told"),
    [
        ((Miss.NEVER_STORED,), (Miss.EVICTED,), None, Miss.EVICTED),
        ((Miss.EXPIRED,), (Miss.EVICTED,), Miss.OTHER_NUMERICS, Miss.EXPIRED),
        ((Miss.NEVER_STORED,), (Miss.NEVER_STORED,), None, Miss.NEVER_STORED),
        ((Miss.NEVER_STORED,), (Miss.NEVER_STORED,), Miss.OTHER_NAMESPACE, Miss.OTHER_NAMESPACE),
        ((Miss.NEVER_STORED,), (Miss.NEVER_STORED,), Miss.OTHER_NUMERICS, Miss.OTHER_NUMERICS),
        ((Miss.NEVER_STORED,), (), None, Miss.UNKNOWN),
    ],
)
def test_of_several_stores_the_one_that_knows_is_believed(
    near: tuple[Miss, ...], far: tuple[Miss, ...], known: Miss | None, told: Miss
) -> None:
    answers = {
        "near": SurveyResult((None,), None, near),
        "far": SurveyResult((None,), None, far, known),
    }
    assert united(answers, 1, []).missing is told
    assert united(answers, 0, [Tail(0, A)]).missing is told
    there = {**answers, "third": SurveyResult((5,), None)}
    assert united(there, 1, []).missing is None
