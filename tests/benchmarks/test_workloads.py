"""Families of requests: blocks have one parent, and LRU is not far ahead on any family."""

from __future__ import annotations

import random

import pytest

from benchmarks.evict import repeated
from benchmarks.workloads import FAMILIES, Family, requests, uniform
from benchmarks.workloads.hard import HARD
from kvstore.index.eviction import make_policy
from kvstore.limits import EVICTIONS, LRU, RETURNS
from kvstore.trace.simulate import new_index, replay, serve


@pytest.mark.parametrize("family", [*FAMILIES, *HARD], ids=lambda family: str(family.__name__))
def test_a_block_stands_for_itself_and_all_before_it(family: Family) -> None:
    trace = requests(family(random.Random(5), 300))
    assert len(trace) == 300
    assert trace == requests(family(random.Random(5), 300))
    parents: dict[bytes, bytes] = {}
    for request in trace:
        assert request.names
        for parent, name in zip((b"", *request.names), request.names, strict=False):
            assert parents.setdefault(name, parent) == parent


@pytest.mark.parametrize("family", HARD, ids=lambda family: str(family.__name__))
def test_on_a_hard_family_fewer_hits_are_lost_than_the_store_has_blocks(family: Family) -> None:
    trace = requests(family(random.Random(2), 600))
    lru, returns = (replay(trace, 100, make_policy(name)).hits for name in (LRU, RETURNS))
    assert returns > lru - 100


def test_on_uniform_requests_no_policy_is_better_in_expectation() -> None:
    """Both stores hold as many blocks before each request, and all documents are equally likely."""
    stores = [new_index(100, make_policy(name)) for name in EVICTIONS]
    for request in requests(uniform(random.Random(3), 400)):
        one, other = (store.stats().entries for store in stores)
        assert one == other
        for store in stores:
            serve(store, request)
            blocks = store.entries(request.at)
            stored = {block.name for block in blocks}
            assert all(block.parent is None or block.parent in stored for block in blocks)


def test_repeated_families_are_one_row_for_each_budget() -> None:
    header, _, *rows = repeated(20, range(2), hard=True)
    assert len(rows) == 2 * len(HARD)
    assert all(row.count("|") == header.count("|") for row in rows)
