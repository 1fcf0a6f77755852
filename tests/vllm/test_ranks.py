"""Two ranks of tensor parallelism in a real ``vllm serve``: each saves and loads its own heads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.block.namespace import LAYOUT
from kvrelay.engine.vllm.kv.shards import HeadShards
from tests.cluster.processes import alive, until
from tests.vllm.conftest import NAMESPACE
from tests.vllm.environment import ROOT
from tests.vllm.rig import BLOCK, StoreProcess, prompt, with_store
from tests.vllm.serve_rig import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

RANKS = 2
LENGTHS = (31, 64, 200, 777)
PROMPTS = [prompt(700 + length, length) for length in LENGTHS]
HITS = [min(length // BLOCK * BLOCK, length - 1) for length in LENGTHS]
WHOLE = Namespace(
    NAMESPACE["model"],
    NAMESPACE["revision"],
    "float32",
    LAYOUT,
    BLOCK,
    numerics=NAMESPACE["numerics"],
)


@pytest.fixture(scope="module")
def ranks(
    store: StoreProcess, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    transfer = with_store(store.url, {"namespace": NAMESPACE})
    log = tmp_path_factory.mktemp("ranks") / "log"
    ranks, path = ("--tensor-parallel-size", str(RANKS)), (ROOT, ROOT / "tests/vllm/site")
    server = VllmServer(tiny, log, transfer, *ranks, path=path)  # see sitecustomize.py there
    yield server
    server.close()


def chains_of(tokens: list[int]) -> list[list[bytes]]:
    """Names of the full blocks of ``tokens``, for each rank."""
    spaces = [HeadShards(RANKS, RANKS).namespace(WHOLE, rank) for rank in range(RANKS)]
    return [Namer(space).chain(tokens, BLOCK) for space in spaces]


def test_each_rank_loads_what_it_saved(ranks: VllmServer, store: StoreProcess) -> None:
    cold = [ranks.complete(tokens) for tokens in PROMPTS]
    assert [answer.account["external"] for answer in cold] == [0] * len(PROMPTS)
    for tokens in PROMPTS:
        for chain in chains_of(tokens):
            store.wait_for(chain)
    ranks.forget()
    warm = [ranks.complete(tokens) for tokens in PROMPTS]
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [answer.account["external"] for answer in warm] == HITS
    for answer, length in zip(cold + warm, 2 * LENGTHS, strict=True):
        account = answer.account
        assert account["computed"] == length - int(account["external"])
        assert account["executed"] == int(account["computed"]) + 15
    blocks = sum((length + 15) // BLOCK for length in LENGTHS)
    until(
        lambda: ranks.counter("store_saved_blocks") == RANKS * blocks,
        lambda: f"{ranks.counter('store_saved_blocks')} blocks saved, not {RANKS} x {blocks}",
    )


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_load_counts_if_every_rank_did_it(
    ranks: VllmServer, store: StoreProcess, rank: int
) -> None:
    tokens = prompt(800 + rank, 300)
    cold = ranks.complete(tokens)
    chains = chains_of(tokens)
    for chain in chains:
        store.wait_for(chain)
    ranks.forget()
    store.flip(chains[rank], 4)
    warm = ranks.complete(tokens)
    assert warm.tokens == cold.tokens
    assert warm.account["missed"] == "failed_verification"
    assert (warm.account["external"], warm.account["failed"]) == (4 * BLOCK, 5 * BLOCK)


def test_a_killed_rank_ends_the_server(ranks: VllmServer) -> None:
    """vLLM gives up; no other process of it stays."""
    processes = ranks.processes()
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes}
    workers = [pid for pid, title in titles.items() if title.startswith(b"VLLM::Worker")]
    assert len(workers) == RANKS, titles
    os.kill(workers[-1], signal.SIGKILL)
    until(lambda: not any(map(alive, processes)), lambda: f"{ranks.processes()} run", 60.0)
