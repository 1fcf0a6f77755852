"""Greedy tokens through the whole cluster equal those of plain ``transformers``, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.cluster.supervisor import Cluster
from tests.exact.asks import Ask, ask_all, check_usage, prompts
from tests.exact.conftest import TRAINED, Models, cluster
from tests.exact.idle import check_idle
from tests.exact.oracle import Oracle
from tests.models import KINDS, VOCAB

ARCHITECTURES = (*KINDS, TRAINED)
BLOCK_SIZES = (1, 4, 16)
LONGEST = 600
TIE = 1e-4  # of logits around 5, in float32; two orders of summing differ by up to 1e-5
MADE = 12


def asks_of(count: int, block_size: int, seed: int) -> list[Ask]:
    return [Ask(prompt, MADE) for prompt in prompts(count, block_size, VOCAB, seed, LONGEST)]


def without_ties(oracle: Oracle, asks: Sequence[Ask]) -> list[Ask]:
    """Random weights now and then tie two tokens: then the order of a sum decides, and no token is
    the right one. Whatever is further apart than ``TIE`` must be equal."""
    gaps = [oracle.gap(ask.prompt, oracle.greedy(ask.prompt, ask.max_tokens)) for ask in asks]
    ties = [gap for gap in gaps if gap < TIE]
    print(f"{len(ties)} ties: {ties}")
    return [ask for ask, gap in zip(asks, gaps, strict=True) if gap >= TIE]


def compare(up: Cluster, asks: Sequence[Ask], wanted: Sequence[list[int]]) -> int:
    """Ask, compare tokens and accounts; how many prompt tokens were cached."""
    answers = ask_all(up.router, asks)
    for ask, want, answer in zip(asks, wanted, answers, strict=True):
        assert list(answer.token_ids) == want, f"a prompt of {len(ask.prompt)} tokens"
        check_usage(ask, answer)
    return sum(answer.usage.cached_prompt_tokens for answer in answers)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture(kind: str, models: Models) -> None:
    """Cold, then again with a pool that has lost most of it: from the store, and mixed."""
    block_size = BLOCK_SIZES[ARCHITECTURES.index(kind) % 3]
    oracle = Oracle(models(kind))
    asks = without_ties(oracle, asks_of(210, block_size, seed=len(kind)))[:200]
    assert len(asks) == 200
    wanted = [oracle.greedy(ask.prompt, MADE) for ask in asks]
    blocks = -(-(LONGEST + MADE) // block_size) + 8
    with cluster(models(kind), block_size=block_size, num_blocks=blocks) as up:
        cold = compare(up, asks, wanted)
        warm = compare(up, asks, wanted)
        assert warm > cold + sum(len(ask.prompt) - block_size for ask in asks) // 2
        short = [ask for ask in asks if len(ask.prompt) <= 40][:10]
        twice = [ask for ask in short for _ in range(2)]
        compare(up, twice, [want for ask in twice for want in [wanted[asks.index(ask)]]])
        check_idle(up)


@pytest.mark.parametrize(
    ("prefill", "decode", "block_size", "budget"),
    [(2, 2, 1, 7), (1, 2, 4, 1), (2, 1, 4, 3), (1, 1, 16, 13), (0, 2, 16, 64)],
)
def test_workers_block_sizes_and_chunks(
    models: Models, prefill: int, decode: int, block_size: int, budget: int
) -> None:
    """Budgets that cut prompts at every offset; one, several and no workers for prefill."""
    longest = 40 * budget if budget < 15 else LONGEST
    made = prompts(60, block_size, VOCAB, seed=budget, longest=longest)
    asks = [Ask(prompt, MADE) for prompt in made]
    oracle = Oracle(models("llama"))
    wanted = [oracle.greedy(ask.prompt, MADE) for ask in asks]
    settings = {"prefill": prefill, "decode": decode, "block_size": block_size}
    settings |= {"num_blocks": 2400 // block_size, "max_num_batched_tokens": budget}
    with cluster(models("llama"), **settings) as up:  # type: ignore[arg-type]
        compare(up, asks, wanted)
        compare(up, asks, wanted)
        check_idle(up)


def test_preemptions(models: Models) -> None:
    """64 at once in a pool so small that they push each other out, at least 100 times."""
    asks = [Ask(prompt[:24], 40) for prompt in prompts(192, 4, VOCAB, seed=7, longest=24)]
    oracle = Oracle(models("qwen3"))
    asks = without_ties(oracle, asks)
    wanted = [oracle.greedy(ask.prompt, ask.max_tokens) for ask in asks]
    with cluster(models("qwen3"), block_size=4, num_blocks=40) as up:
        answers = ask_all(up.router, asks, at_once=64)
        for ask, want, answer in zip(asks, wanted, answers, strict=True):
            assert list(answer.token_ids) == want
            check_usage(ask, answer)
        check_idle(up)
        preemptions = sum(leg.preemptions for answer in answers for leg in answer.usage.legs)
    print(f"{preemptions} preemptions")
    assert preemptions >= 100
