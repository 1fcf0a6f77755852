"""Workers whose store is a Redis Cluster, of which one master is killed under load.

Requests continue with the same tokens. The blocks on the other masters stay, and blocks that are
computed again are stored there too, so that later requests hit all of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvrelay import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from kvrelay.usage import Usage
from kvstore import connect
from kvstore.base import NameQuery
from tests.exact.oracle import Oracle
from tests.failures.rig import BACKOFF
from tests.failures.streams import Query, draw
from tests.kvstore.redis import redisserver

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BLOCK, PROMPT, MAX_TOKENS, COUNT = 16, 80, 24, 12
TIMEOUT = 100.0
NAME_BYTES = 32


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redisserver.Cluster]:
    cluster = redisserver.Cluster(tmp_path_factory.mktemp("redis"))
    with redisserver.running(cluster):
        yield cluster


@pytest.fixture(scope="module")
def workers(model: Path, redis: redisserver.Cluster) -> Iterator[Cluster]:
    lines: list[str] = []
    config = ClusterConfig(
        model=str(model),
        port=0,
        dtype="float32",
        store=f"redis+cluster://{redis.addresses}",
        block_size=BLOCK,
        num_blocks=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        disaggregate="always",
    )
    with ExitStack() as stack:
        stack.callback(lambda: print("\n".join(lines[-200:])))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("KVRELAY_AUDIT", "true")
        yield stack.enter_context(
            Cluster(
                config,
                on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"),
                backoff=BACKOFF,
            )
        )


class Load:
    """Clients that send one request after another inside the context."""

    def __init__(self, address: str, queries: list[Query], expected: list[list[int]]) -> None:
        self._address = address
        self._queries = queries
        self._expected = expected
        self._stop = threading.Event()
        self.answered = 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(3)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait(self, more: int) -> None:
        """Wait for ``more`` further responses."""
        wanted, deadline = self.answered + more, time.monotonic() + TIMEOUT
        while self.answered < wanted and not self.wrong:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with Client(self._address) as client:
            while not self._stop.is_set():
                index = chance.randrange(len(self._queries))
                try:
                    tokens, _ = complete(client, self._queries[index])
                except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                    self.wrong.append(repr(error))
                    return
                if tokens != self._expected[index]:
                    self.wrong.append(f"{index}: {tokens} is not {self._expected[index]}")
                self.answered += 1


def complete(client: Client, query: Query) -> tuple[list[int], Usage]:
    """The tokens of an answer and its account."""
    tokens: list[int] = []
    usage = None
    for chunk in client.generate(timeout=TIMEOUT, **query.parameters):
        tokens += chunk.token_ids
        usage = chunk.usage or usage
    assert usage is not None
    return tokens, usage


def anew(cluster: Cluster) -> None:
    """Restart the workers: their pools are empty, so every hit comes from the store."""
    for role in ("prefill", "decode"):
        cluster.kill(role, 0)
    cluster.wait()


def cached(cluster: Cluster, queries: list[Query], expected: list[list[int]]) -> list[int]:
    """Of each query, the prompt tokens that restarted workers load from the store."""
    anew(cluster)
    found = []
    with Client(cluster.router) as client:
        for one, tokens in zip(queries, expected, strict=True):
            made, usage = complete(client, one)
            assert made == tokens
            assert usage.cached_prompt_tokens is not None
            found.append(usage.cached_prompt_tokens)
    return found


def names_by_server(redis: redisserver.Cluster) -> list[set[bytes]]:
    """The names of the blocks on each server."""
    found = []
    for server in redis.servers:
        with server.client() as client:
            keys = list(client.scan_iter("kvrelay:*", 1000))
        found.append({bytes.fromhex(key.decode().rpartition(":")[2]) for key in keys})
    return found


def test_one_of_three_masters_is_killed_under_load(
    workers: Cluster, redis: redisserver.Cluster, oracle: Oracle
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    queries = draw(random.Random(seed), COUNT, PROMPT, MAX_TOKENS)
    with Client(workers.router) as client:
        expected = [complete(client, one)[0] for one in queries]
    for one, tokens in zip(queries, expected, strict=True):
        if one.seed is None:
            assert tokens == oracle.greedy(one.prompt, MAX_TOKENS)

    with Load(workers.router, queries, expected) as load:
        load.wait(4)
        before = names_by_server(redis)
        redis.servers[1].kill()
        load.wait(3 * COUNT)
    assert not load.wrong
    blocks = set().union(*before)
    with closing(connect(f"redis+cluster://{redis.addresses}")) as store:
        names = sorted(blocks)
        sizes = store.survey(NameQuery(names), TIMEOUT).sizes
        there = {name for name, size in zip(names, sizes, strict=True) if size is not None}
    lost = before[1]
    print(f"{len(blocks)} blocks, {len(lost)} on the server that died, {len(there)} found after")
    assert blocks - lost <= there
    assert 0.4 < len(blocks - lost) / len(blocks) < 0.9

    # Workers that start now find what the load has put to second places as well.
    cached(workers, queries, expected)
    assert min(cached(workers, queries, expected)) >= PROMPT - BLOCK
