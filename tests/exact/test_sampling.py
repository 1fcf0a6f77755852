"""Seeded sampling: the same tokens from any cluster, any preemption and any resumption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.queries import Query, Sampling, check_usage, complete_all, prompts
from tests.models import VOCAB

MADE = 24
PLAIN: Sampling = {"temperature": 0.8}
RICH: Sampling = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 4,
    "logit_bias": {token: 5.0 - token % 11 for token in range(100, 164)},
    "bad_words": [chr(letter) for letter in range(ord("a"), ord("k"))],
    "bad_word_ids": [[first, last] for first in range(100, 108) for last in range(100, 130)],
}
KIND = "llama"

Tokens = list[tuple[int, ...]]


def make_queries() -> list[Query]:
    made = prompts(64, 4, VOCAB, seed=21, longest=60)
    return [Query(prompt, MADE, seed=1000 + index) for index, prompt in enumerate(made)]


def tokens(up: Cluster, queries: list[Query], sampling: Sampling, at_once: int = 16) -> Tokens:
    answers = complete_all(up.router, queries, at_once, **sampling)
    for query, answer in zip(queries, answers, strict=True):
        check_usage(query, answer)
    return [tuple(answer.token_ids) for answer in answers]


@pytest.fixture(scope="module")
def both_roles(models: Models) -> Iterator[Cluster]:
    """One worker that does everything."""
    with cluster(models(KIND), prefill=0, decode=1, block_size=4, num_blocks=512) as up:
        yield up


@pytest.fixture(scope="module")
def relayed(models: Models) -> Iterator[Cluster]:
    """Two workers of each role."""
    with cluster(models(KIND), prefill=2, decode=2, block_size=4, num_blocks=512) as up:
        yield up


@pytest.mark.parametrize("count", [32, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [PLAIN, RICH], ids=["plain", "rich"])
def test_disaggregated(
    both_roles: Cluster, relayed: Cluster, sampling: Sampling, count: int
) -> None:
    queries = make_queries()[:count]
    alone = tokens(both_roles, queries, sampling)
    assert len(set(alone)) == len(alone), "seeds make no difference"
    assert tokens(relayed, queries, sampling) == alone
    assert tokens(relayed, queries[::-1], sampling, at_once=3) == alone[::-1]
    check_idle(relayed)


def test_preempted(both_roles: Cluster, models: Models) -> None:
    queries = make_queries()
    alone = tokens(both_roles, queries, RICH)
    with cluster(models(KIND), block_size=4, num_blocks=22) as up:
        answers = complete_all(up.router, queries, 64, **RICH)
        assert [tuple(answer.token_ids) for answer in answers] == alone
        check_idle(up)
    assert sum(leg.preemptions for answer in answers for leg in answer.usage.legs) > 0


@pytest.mark.parametrize("sampling", [PLAIN, RICH], ids=["plain", "rich"])
def test_resumed_at_every_position(
    both_roles: Cluster, relayed: Cluster, sampling: Sampling
) -> None:
    chosen = make_queries()[:6]
    alone = tokens(both_roles, chosen, sampling)
    again = [
        Query(query.prompt, MADE, query.seed, made[:position])
        for query, made in zip(chosen, alone, strict=True)
        for position in range(len(made))
    ]
    rest = tokens(relayed, again, sampling)
    wanted = [made[position:] for made in alone for position in range(len(made))]
    assert rest == wanted
    check_idle(relayed)


@pytest.mark.slow
def test_float16_and_bfloat16_agree_with_themselves(models: Models, tmp_path: Path) -> None:
    """In half precision one path is compared with the other, one request at a time."""
    queries = make_queries()[:16]
    for dtype in ("bfloat16", "float16"):
        with cluster(models(KIND), prefill=0, block_size=4, num_blocks=512, dtype=dtype) as up:
            alone = tokens(up, queries, PLAIN, at_once=1)
        with cluster(models(KIND), block_size=4, num_blocks=512, dtype=dtype) as up:
            assert tokens(up, queries, PLAIN, at_once=1) == alone
