"""Greedy tokens through the whole cluster equal those of plain ``transformers``, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import TRAINED, Models, cluster
from tests.exact.idle import check_idle
from tests.exact.oracle import Oracle
from tests.exact.queries import Query, check_usage, complete_all, prompts
from tests.models import KINDS, VOCAB

ARCHITECTURES = (*KINDS, TRAINED)
BLOCK_SIZES = (1, 4, 16)
LONGEST = 600
TIE = 1e-4  # of logits around 5, in float32; two orders of summing differ by up to 1e-5
MADE = 12
# The others are among the slow tests, for the sake of the time that `make test` takes. Llama is in
# the tests of workers, block sizes and chunks.
QUICK = ("qwen3-moe",)


def queries_of(count: int, block_size: int, seed: int) -> list[Query]:
    return [Query(prompt, MADE) for prompt in prompts(count, block_size, VOCAB, seed, LONGEST)]


def without_ties(oracle: Oracle, queries: Sequence[Query]) -> list[Query]:
    """The queries without near ties: with random weights two logits may differ by less than a
    change in the order of a sum, so that neither token is the right one."""
    wanted = oracle.greedy_all([query.prompt for query in queries], queries[0].max_tokens)
    gaps = [oracle.gap(q.prompt, want) for q, want in zip(queries, wanted, strict=True)]
    ties = [gap for gap in gaps if gap < TIE]
    print(f"{len(ties)} ties: {ties}")
    return [query for query, gap in zip(queries, gaps, strict=True) if gap >= TIE]


def compare(up: Cluster, queries: Sequence[Query], wanted: Sequence[list[int]]) -> int:
    """Compare tokens and usage with what is wanted; returns the cached prompt tokens."""
    answers = complete_all(up.router, queries)
    for query, want, answer in zip(queries, wanted, answers, strict=True):
        assert list(answer.token_ids) == want, f"a prompt of {len(query.prompt)} tokens"
        check_usage(query, answer)
    return sum(answer.usage.cached_prompt_tokens or 0 for answer in answers)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in ARCHITECTURES
    ],
)
def test_every_architecture(kind: str, models: Models) -> None:
    """Cold, then again with a pool that has lost most of it: from the store, and mixed."""
    block_size = BLOCK_SIZES[ARCHITECTURES.index(kind) % 3]
    oracle = Oracle(models(kind))
    queries = without_ties(oracle, queries_of(210, block_size, seed=len(kind)))[:200]
    assert len(queries) == 200
    wanted = [oracle.greedy(query.prompt, MADE) for query in queries]
    blocks = -(-(LONGEST + MADE) // block_size) + 8
    sizes = {"block_size": block_size, "num_blocks": blocks, "store_budget": 1 << 28}
    with cluster(models(kind), **sizes) as up:  # type: ignore[arg-type]
        cold = compare(up, queries, wanted)
        warm = compare(up, queries, wanted)
        assert warm > cold + sum(len(query.prompt) - block_size for query in queries) // 2
        short = [query for query in queries if len(query.prompt) <= 40][:10]
        twice = [query for query in short for _ in range(2)]
        compare(up, twice, [want for query in twice for want in [wanted[queries.index(query)]]])
        check_idle(up)


@pytest.mark.parametrize(
    ("prefill", "decode", "block_size", "budget"),
    [
        (2, 2, 1, 7),
        pytest.param(1, 2, 4, 1, marks=pytest.mark.slow),
        (0, 2, 16, 64),
        pytest.param(2, 1, 4, 3, marks=pytest.mark.slow),
        pytest.param(1, 1, 16, 13, marks=pytest.mark.slow),
    ],
)
def test_workers_block_sizes_and_chunks(
    models: Models, prefill: int, decode: int, block_size: int, budget: int
) -> None:
    """Budgets that cut prompts at every offset; one, several and no workers for prefill."""
    longest = 40 * budget if budget < 15 else LONGEST
    made = prompts(60, block_size, VOCAB, seed=budget, longest=longest)
    queries = [Query(prompt, MADE) for prompt in made]
    oracle = Oracle(models("llama"))
    wanted = oracle.greedy_all(made, MADE)
    settings = {"prefill": prefill, "decode": decode, "block_size": block_size}
    settings |= {"num_blocks": 2400 // block_size, "max_num_batched_tokens": budget}
    with cluster(models("llama"), **settings) as up:  # type: ignore[arg-type]
        compare(up, queries, wanted)
        compare(up, queries, wanted)
        check_idle(up)


def test_preemptions(models: Models) -> None:
    """64 at once in a pool so small that there are at least 100 preemptions."""
    queries = [Query(prompt[:24], 40) for prompt in prompts(192, 4, VOCAB, seed=7, longest=24)]
    oracle = Oracle(models("qwen3"))
    queries = without_ties(oracle, queries)
    wanted = [oracle.greedy(query.prompt, query.max_tokens) for query in queries]
    with cluster(models("qwen3"), block_size=4, num_blocks=40) as up:
        answers = complete_all(up.router, queries, at_once=64)
        for query, want, answer in zip(queries, wanted, answers, strict=True):
            assert list(answer.token_ids) == want
            check_usage(query, answer)
        check_idle(up)
        preemptions = sum(leg.preemptions for answer in answers for leg in answer.usage.legs)
    print(f"{preemptions} preemptions")
    assert preemptions >= 100
