"""Several samples of a prompt: each is a single request's, whatever happens to any of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from kvrelay import AsyncClient, Chunk, Completion
from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.queries import Query, Sampling, complete_all, prompts
from tests.exact.test_sampling import PLAIN, RICH
from tests.models import VOCAB

KIND = "llama"
BLOCK = 4
MADE = 10
N = 4
COUNTS = pytest.mark.parametrize("count", [12, pytest.param(24, marks=pytest.mark.slow)])

Outputs = list[tuple[int, ...]]


def make_queries(count: int = 24) -> list[Query]:
    made = prompts(count, BLOCK, VOCAB, seed=33, longest=60)
    return [Query(prompt, MADE, seed=500 + 10 * index) for index, prompt in enumerate(made)]


def singles(up: Cluster, queries: Sequence[Query], sampling: Sampling) -> list[Outputs]:
    """For each query the outputs of ``N`` requests of their own."""
    each = [Query(q.prompt, MADE, q.seed + index) for q in queries for index in range(N)]
    answers = [answer.token_ids for answer in complete_all(up.router, each, **sampling)]
    return [answers[at : at + N] for at in range(0, len(answers), N)]


async def _samples(
    address: str, queries: Sequence[Query], at_once: int, sampling: Sampling
) -> list[Completion]:
    room = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def one(query: Query) -> Completion:
            async with room:
                return await client.complete(
                    token_ids=query.prompt,
                    max_tokens=query.max_tokens,
                    seed=query.seed,
                    n=N,
                    timeout=120.0,
                    **sampling,
                )

        return await asyncio.gather(*map(one, queries))


def samples(
    up: Cluster, queries: Sequence[Query], sampling: Sampling, at_once: int = 6
) -> tuple[list[Outputs], list[Completion]]:
    """For each query the outputs by index; the usage of each is checked."""
    answers = asyncio.run(_samples(up.router, queries, at_once, sampling))
    for query, answer in zip(queries, answers, strict=True):
        check_account(query, answer)
    return [[choice.token_ids for choice in answer.choices] for answer in answers], answers


def check_account(query: Query, answer: Completion) -> None:
    """The prompt once, the outputs summed, the hits of the first leg, every position accounted."""
    usage, prompt = answer.usage, len(query.prompt)
    made = Counter({choice.index: len(choice.token_ids) for choice in answer.choices})
    assert [choice.seed for choice in answer.choices] == [query.seed + i for i in range(N)]
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, made.total())
    first = usage.legs[0]
    assert (first.sample, first.length) == (0, prompt)
    assert usage.cached_prompt_tokens == first.local + first.external
    generated = Counter[int]()
    distinct = 0
    for sample in range(N):
        legs = [leg for leg in usage.legs if leg.sample == sample]
        spans = [
            range(item.local + item.external, item.frontier)
            for leg in legs
            for item in leg.admissions
        ]
        distinct += len({at for span in spans for at in span})
        generated[sample] = sum(leg.generated for leg in legs)
        for leg in legs:
            assert leg.local + leg.external + leg.computed == leg.length
    assert generated == made
    assert usage.recomputed == sum(leg.executed for leg in usage.legs) - distinct


def check_computed_once(query: Query, answer: Completion, most: int) -> None:
    """Every sample but the first computes at most so many positions of the prompt."""
    for sample in range(1, N):
        leg = next(leg for leg in answer.usage.legs if leg.sample == sample)
        assert leg.computed <= most, answer.usage
    assert answer.usage.recomputed == 0


@pytest.fixture(scope="module")
def both_roles(models: Models) -> Iterator[Cluster]:
    """One worker that does everything."""
    with cluster(models(KIND), prefill=0, decode=1, block_size=BLOCK, num_blocks=1024) as up:
        yield up


@pytest.fixture(scope="module")
def relayed(models: Models) -> Iterator[Cluster]:
    """Two workers of each role."""
    with cluster(models(KIND), prefill=2, decode=2, block_size=BLOCK, num_blocks=1024) as up:
        yield up


@COUNTS
@pytest.mark.parametrize("sampling", [PLAIN, RICH], ids=["plain", "rich"])
def test_each_is_that_of_a_request_of_its_own(
    both_roles: Cluster, relayed: Cluster, sampling: Sampling, count: int
) -> None:
    queries = make_queries(count)
    alone = singles(both_roles, queries, sampling)
    assert all(len(set(outputs)) > 1 for outputs in alone), "seeds make no difference"
    assert samples(both_roles, queries, sampling)[0] == alone
    assert samples(relayed, queries, sampling)[0] == alone
    assert singles(relayed, queries, sampling) == alone
    check_idle(relayed)


@COUNTS
def test_the_prompt_is_computed_once(models: Models, count: int) -> None:
    """One at a time: the hits are those of a single request, and the others load or share."""
    queries = make_queries(count)
    size = {"block_size": BLOCK, "num_blocks": 1024, "decode": 2}
    for prefill, most in ((1, 1), (0, BLOCK)):
        with cluster(models(KIND), prefill=prefill, **size) as up:  # type: ignore[arg-type]
            wanted = [a.usage for a in complete_all(up.router, queries, 1, **PLAIN)]
        with cluster(models(KIND), prefill=prefill, **size) as up:  # type: ignore[arg-type]
            _, answers = samples(up, queries, PLAIN, at_once=1)
            for query, answer, single in zip(queries, answers, wanted, strict=True):
                check_computed_once(query, answer, most)
                assert answer.usage.cached_prompt_tokens == single.cached_prompt_tokens
            check_idle(up)


def test_greedy_samples_are_equal(relayed: Cluster) -> None:
    outputs, _ = samples(relayed, make_queries(8), {"temperature": 0.0})
    assert all(len(set(each)) == 1 for each in outputs)


def test_preempted(both_roles: Cluster, models: Models) -> None:
    queries = make_queries()
    alone = singles(both_roles, queries, RICH)
    with cluster(models(KIND), block_size=BLOCK, num_blocks=22) as up:
        outputs, answers = samples(up, queries, RICH, at_once=24)
        assert outputs == alone
        check_idle(up)
    assert sum(leg.preemptions for answer in answers for leg in answer.usage.legs) > 0


async def _cut(address: str, other: str, query: Query, cut: int) -> list[Chunk]:
    """Chunks up to a cut from one router, the rest after it from another."""
    async with AsyncClient(address) as client, AsyncClient(other) as second:
        stream = client.generate(
            token_ids=query.prompt,
            max_tokens=MADE,
            seed=query.seed,
            n=N,
            timeout=120.0,
            **RICH,
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == cut:
                break
        if chunks[-1].usage is not None:
            return chunks
        return chunks + [chunk async for chunk in second.resume(stream, timeout=120.0)]


@pytest.mark.parametrize(
    "chosen", [4, pytest.param(5, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_resumed_at_every_cut(both_roles: Cluster, relayed: Cluster, chosen: int) -> None:
    query = make_queries()[chosen]
    (alone,) = singles(both_roles, [query], RICH)
    ends = Counter[str]()
    for cut in range(1, N * MADE + 1):
        chunks = asyncio.run(_cut(both_roles.router, relayed.router, query, cut))
        for index in range(N):
            own = [chunk for chunk in chunks if chunk.index == index]
            made = tuple(token for chunk in own for token in chunk.token_ids)
            assert made == alone[index], (cut, index)
            assert sum(chunk.finish_reason is not None for chunk in own) == 1, (cut, index)
        last = chunks[-1].usage
        assert last is not None
        assert last.completion_tokens == sum(map(len, alone))
        ends["whole" if len(chunks) == cut else "resumed"] += 1
    assert ends["resumed"] > MADE
    check_idle(relayed)
    check_idle(both_roles)
