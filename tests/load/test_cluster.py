"""A real cluster under load: exact against ``transformers``, also while a worker is killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvrelay import Client
from kvrelay.cluster.config import SHIPPED_MODEL, ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from kvrelay.fleet import FleetStatus
from tests.cluster.processes import until
from tests.load.rig import LoadCommand

pytestmark = pytest.mark.cluster
REQUESTS, TOKENS = 16, 24
SMALL = ("--requests", REQUESTS, "--prompt", "20-60", "--output", TOKENS, "--prefix", 32)
CHECK = ("--check", f"transformers:{SHIPPED_MODEL}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One prefill worker, two decode workers, both doors."""
    config = ClusterConfig(port=0, http_port=0, decode=2, threads=1, store_budget=64 << 20)
    with Cluster(config) as made:
        yield made


def fleet(cluster: Cluster) -> FleetStatus:
    """What the router says of its fleet now."""
    with Client(cluster.router) as client:
        return client.fleet()


def sent(cluster: Cluster) -> int:
    """Tokens that the router has sent so far."""
    return fleet(cluster).totals.generation_tokens


def kill_at_work(cluster: Cluster, index: int) -> None:
    """Kill a decode worker that has streams left: stopped first, so that they cannot end before."""
    address = cluster.addresses("decode")[index]

    def stopped_at_work() -> bool:
        cluster.kill("decode", index, signal.SIGSTOP)
        time.sleep(0.3)  # what it had sent arrives
        if any(one.in_flight for one in fleet(cluster).workers if one.address == address):
            return True
        cluster.kill("decode", index, signal.SIGCONT)
        return False

    until(stopped_at_work, lambda: "the worker is at work", 30)
    cluster.kill("decode", index)


def test_the_grpc_door(load: LoadCommand, cluster: Cluster) -> None:
    before = sent(cluster)
    found = load("--router", cluster.router, "--concurrency", 4, *SMALL, *CHECK)
    assert found.status == 0, found.out
    (level,) = found.levels
    assert level["requests"]["done"] == REQUESTS
    assert level["output_tokens"] == REQUESTS * TOKENS == sent(cluster) - before
    assert found.check["verified"] == found.check["usages"] == REQUESTS
    sources = level["prompt_tokens_by_source"]
    assert sum(sources.values()) == level["prompt_tokens"]
    assert sources["local"] + sources["external"] >= 32  # the prefix is computed a few times only
    assert level["migrations"] == 0
    assert level["seconds_from_sent"]["queue"]["mean"] is not None


def test_the_openai_door(load: LoadCommand, cluster: Cluster) -> None:
    """The queue is that of the server's metrics page."""
    found = load(cluster.http, "--rate", 20, *SMALL, *CHECK)
    assert found.status == 0, found.out
    (level,) = found.levels
    assert level["requests"]["done"] == found.check["verified"] == REQUESTS
    assert level["prompt_tokens_by_source"]["cached"] > 0
    assert level["seconds_from_sent"]["queue"]["mean"] is not None
    assert level["migrations"] == 0


def test_chats_of_several_turns(load: LoadCommand, cluster: Cluster) -> None:
    flags = ("--chat", "--turns", 3, "--concurrency", 2, "--requests", 6, "--output", 8)
    found = load(cluster.http, *flags, "--check", "first-run")
    assert found.status == 0, found.out
    assert found.levels[0]["requests"]["done"] == found.check["verified"] == 6
    assert found.levels[0]["prompt_tokens_by_source"]["cached"] > 0


@pytest.mark.slow
def test_a_killed_worker_costs_a_migration_and_no_token(
    load: LoadCommand, cluster: Cluster
) -> None:
    before = sent(cluster)

    def kill() -> None:
        until(lambda: sent(cluster) > before + 400, lambda: "tokens are sent", 120)
        kill_at_work(cluster, 1)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    flags = ("--concurrency", 8, "--seconds", 8, "--prompt", 16, "--output", 200, "--distinct", 8)
    found = load("--router", cluster.router, *flags, *CHECK)
    killer.join()
    assert found.status == 0, found.out
    (level,) = found.levels
    assert level["requests"]["failed"] == 0
    assert level["migrations"] > 0
    assert found.check["verified"] == 8
    assert found.check["compared"] == level["requests"]["done"]  # 8 by the reference, others here
