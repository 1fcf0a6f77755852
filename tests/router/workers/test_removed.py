"""Workers that a router forgets leave its metrics page, whatever removed them; real processes.

The router counts workers that died or hang as lost, not those that drained or left its list.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster
from kvrelay.worker.announce import TTL_SECONDS
from tests.cluster.processes import until
from tests.forked import all_forked
from tests.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
WORKERS = ("prefill", "decode")
LINE = re.compile(r'^(kvrelay:\w+)\{([^}]*\bworker="([^"]*)"[^}]*)\} ', re.MULTILINE)
LOST = re.compile(
    r'^kvrelay:router_lost_workers_total\{[^}]*role="(\w+)"[^}]*\} (\S+)$', re.MULTILINE
)
FORGET_SECONDS = TTL_SECONDS + 20.0
REQUESTS = 8


def layout(listing: Path) -> Callable[[ClusterConfig], tuple[ProcessSpec, ...]]:
    """The router reads the first worker of each role from ``listing``; the others announce."""

    def made(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
        specs = all_forked(process_specs(config))
        first = {spec.role: [spec.address] for spec in reversed(specs) if spec.role in WORKERS}
        listing.write_text(json.dumps(first))
        (router,) = (spec.address for spec in specs if spec.role == "router")
        return tuple(_joining(spec, router, listing) for spec in specs)

    return made


def _joining(spec: ProcessSpec, router: str, listing: Path) -> ProcessSpec:
    if spec.role == "router":
        named = [at for at, word in enumerate(spec.args) if word in ("--prefill", "--decode")]
        left = [w for at, w in enumerate(spec.args) if at not in named and at - 1 not in named]
        return replace(spec, args=(*left, "--announce", "--workers-file", str(listing)))
    if spec.role in WORKERS and spec.index:
        return replace(spec, args=(*spec.args, "--router", router))
    return spec


def lines(cluster: Cluster) -> dict[str, list[str]]:
    """The samples about each worker on the router's page, by address."""
    with urllib.request.urlopen(f"{cluster.http}/metrics", timeout=20) as page:
        text = page.read().decode()
    found: dict[str, list[str]] = {}
    for name, labels, worker in LINE.findall(text):
        found.setdefault(worker, []).append(f"{name}{{{labels}}}")
    return found


def lost(cluster: Cluster) -> dict[str, int]:
    """Lost workers by role, as counted on the router's page."""
    with urllib.request.urlopen(f"{cluster.http}/metrics", timeout=20) as page:
        return {role: int(float(count)) for role, count in LOST.findall(page.read().decode())}


def serve(cluster: Cluster) -> None:
    """Requests one after another, with prompts of their own."""
    with Client(cluster.router) as client:
        for first in range(REQUESTS):
            answer = client.complete(token_ids=[first] * 40, max_tokens=8, ignore_eos=True)
            assert len(answer.token_ids) == 8


def leaves(cluster: Cluster, address: str, others: Sequence[str]) -> None:
    """Wait until the page has no line about ``address``; all ``others`` stay on it."""
    until(
        lambda: address not in lines(cluster),
        lambda: f"{address} is off the page: {lines(cluster).get(address)}",
        FORGET_SECONDS,
    )
    assert sorted(lines(cluster)) == sorted(others)
    serve(cluster)
    assert sorted(lines(cluster)) == sorted(others)


def test_removed_killed_and_drained_workers_leave_the_page(tmp_path: Path) -> None:
    listing = tmp_path / "workers.json"
    config = ClusterConfig(
        model=str(tiny_model("llama", tmp_path / "llama", eos_token_id=None)),
        port=0,
        http_port=0,
        dtype="float32",
        prefill=2,
        decode=5,
        block_size=16,
        num_blocks=64,
        store_budget=1 << 25,
    )
    with Cluster(config, backoff=None, layout=layout(listing)) as cluster:
        prefill, decode = cluster.addresses("prefill"), cluster.addresses("decode")
        until(lambda: len(lines(cluster)) == 7, "all workers are on the page")
        serve(cluster)
        assert all(len(samples) == 1 for samples in lines(cluster).values())

        listing.write_text(json.dumps({"prefill": [prefill[0]]}))
        leaves(cluster, decode[0], [*prefill, *decode[1:]])
        assert cluster.process("decode", 0).pid is not None, "it is removed, not ended"

        cluster.kill("decode", 1)
        leaves(cluster, decode[1], [*prefill, *decode[2:]])
        assert lost(cluster) == {"prefill": 0, "decode": 1}

        cluster.kill("decode", 2, signal.SIGTERM)
        leaves(cluster, decode[2], [*prefill, *decode[3:]])

        cluster.kill("prefill", 1, signal.SIGTERM)
        leaves(cluster, prefill[1], [prefill[0], *decode[3:]])
        assert lost(cluster) == {"prefill": 0, "decode": 1}

        cluster.kill("decode", 3, signal.SIGSTOP)
        leaves(cluster, decode[3], [prefill[0], decode[4]])
        assert lost(cluster) == {"prefill": 0, "decode": 2}
        cluster.kill("decode", 3, signal.SIGCONT)
