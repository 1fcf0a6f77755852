"""A cluster over two stores, each with half of every chain: same tokens, and the source of each."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvrelay import Completion
from kvrelay.block.name import NAME_BYTES
from kvrelay.cluster.supervisor import Cluster
from kvstore import connect
from kvstore.client.admin import StoreAdmin
from kvstore.urls import public_url
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.queries import Query, check_usage, complete_all
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import copied

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SIZE, COUNT, TIMEOUT = 8, 8, 30.0


class Stores:
    """Two stores, ``near`` before ``far``."""

    def __init__(self) -> None:
        self.near = start_service("--budget=64MiB")
        self.far = start_service("--budget=64MiB")
        self.processes: list[subprocess.Popen[str]] = [self.near[0], self.far[0]]
        self.urls = (self.near[1], self.far[1])

    def halve(self) -> None:
        """Every other block goes from the near store to the far one, and is in one only."""
        near, far, aside = connect(self.urls[0]), connect(self.urls[1]), connect("memory://aside")
        admin = StoreAdmin(self.urls[0].removeprefix("kvrelay://"))
        names = [listed.name for listed in admin.list(TIMEOUT)]
        assert all(len(name) == NAME_BYTES for name in names)
        for name in names:
            assert copied(near, aside, name)
        near.clear(TIMEOUT)
        for name in names:
            assert copied(aside, near if name[-1] % 2 else far, name)
        for store in (near, far, aside):
            store.close()
        admin.close()


@contextmanager
def two_stores() -> Iterator[Stores]:
    stores = Stores()
    try:
        yield stores
    finally:
        for process in stores.processes:
            stop(process)


def make_queries(chance: random.Random) -> list[Query]:
    return [
        Query(tuple(chance.randrange(256) for _ in range(chance.randint(60, 120))), 12)
        for _ in range(COUNT)
    ]


def from_stores(done: Sequence[Completion]) -> dict[str, int]:
    """Tokens by store, of the prefill legs."""
    found: dict[str, int] = {}
    for completion in done:
        leg = completion.usage.legs[0]
        assert leg.role == "prefill"
        for one in leg.external_by_store:
            found[one.store] = found.get(one.store, 0) + one.tokens
    return found


def fresh(up: Cluster) -> None:
    """The prefill worker has an empty pool."""
    up.kill("prefill", 0)
    up.wait()


def test_half_of_every_chain_in_each_store_and_one_killed_under_load(models: Models) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    queries = make_queries(random.Random(seed))
    with (
        two_stores() as stores,
        cluster(models("llama"), store=",".join(stores.urls), block_size=SIZE) as up,
    ):
        first = complete_all(up.router, queries)
        tokens = [done.token_ids for done in first]
        check_idle(up)
        stores.halve()
        fresh(up)
        again = complete_all(up.router, queries)
        assert [done.token_ids for done in again] == tokens
        for query, done in zip(queries, again, strict=True):
            check_usage(query, done)
        found = from_stores(again)
        assert set(found) == {public_url(url) for url in stores.urls}
        assert min(found.values()) > SIZE * COUNT
        cached = sum(done.usage.legs[0].external for done in again)
        assert cached == sum(found.values()) > sum(len(query.prompt) for query in queries) * 0.9
        check_idle(up)
        fresh(up)
        # One dies while they are loaded and saved: slower, with the same tokens.
        killer = threading.Timer(0.05, stores.far[0].kill)
        killer.start()
        last = complete_all(up.router, queries * 3, at_once=4)
        killer.join()
        stores.far[0].wait()
        assert [done.token_ids for done in last] == tokens * 3
        for query, done in zip(queries * 3, last, strict=True):
            check_usage(query, done)
        check_idle(up)
