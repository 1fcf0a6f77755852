"""Queries to a cluster, and the check of the usage that every answer reports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from kvrelay import AsyncClient, Completion


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt, the number of output tokens, and the tokens so far."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    so_far: tuple[int, ...] = ()


def prompts(
    count: int, block_size: int, vocab: int, seed: int, longest: int = 600
) -> list[tuple[int, ...]]:
    """Lengths around every boundary, then random ones; a third shares a prefix with another."""
    print(f"prompts: seed {seed}")
    chance, size = random.Random(seed), block_size
    edges = [1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 40, longest]
    lengths = [length for length in edges if length > 0]
    made: list[tuple[int, ...]] = []
    while len(made) < count:
        index = len(made)
        length = lengths[index] if index < len(lengths) else _length(chance, longest)
        fresh = tuple(chance.randrange(vocab) for _ in range(length))
        if made and chance.random() < 0.34:
            other = chance.choice(made)
            fresh = (other[: chance.randint(0, len(other))] + fresh)[:length]
        made.append(fresh)
    return made


def _length(chance: random.Random, longest: int) -> int:
    """Mostly short, now and then anything."""
    return chance.randint(1, longest if chance.random() < 0.2 else min(80, longest))


class Sampling(TypedDict, total=False):
    """How tokens are chosen, the same for all queries."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_word_ids: Sequence[Sequence[int]]
    structured_output: Mapping[str, object]


async def _complete_all(
    address: str, queries: Sequence[Query], at_once: int, sampling: Sampling
) -> list[Completion]:
    room = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def one(query: Query) -> Completion:
            async with room:
                return await client.complete(
                    token_ids=query.prompt,
                    output_token_ids=query.so_far,
                    max_tokens=query.max_tokens,
                    seed=query.seed,
                    timeout=120.0,
                    **sampling,
                )

        return await asyncio.gather(*(one(query) for query in queries))


def complete_all(
    address: str, queries: Sequence[Query], at_once: int = 16, **sampling: Unpack[Sampling]
) -> list[Completion]:
    """The completions, in order; greedy by default."""
    chosen: Sampling = {"temperature": 0.0, **sampling}
    return asyncio.run(_complete_all(address, queries, at_once, chosen))


def check_usage(query: Query, completion: Completion) -> None:
    """I3, I5 and I6 of docs/accounting.md, leg by leg."""
    usage, prompt = completion.usage, len(query.prompt)
    assert usage.prompt_tokens == prompt
    assert usage.completion_tokens == len(completion.token_ids) + len(query.so_far)
    for leg in usage.legs:
        assert leg.local + leg.external + leg.computed == leg.length, leg
        assert leg.computed >= 1, usage
        assert sum(one.tokens for one in leg.external_by_store) == leg.external, leg
        for admission in leg.admissions:
            assert admission.local + admission.external + admission.fresh == admission.length
            assert admission.fresh >= 1
        ran = [range(item.local + item.external, item.frontier) for item in leg.admissions]
        assert leg.executed == sum(map(len, ran))
        assert leg.recomputed == leg.executed - len({at for span in ran for at in span}), leg
        own_positions = max(leg.generated - 1, 0)  # the last sampled token's KV is never made
        if len(ran) == 1:
            assert leg.executed == leg.computed + own_positions, leg
        first_hit = leg.admissions[0].local, leg.admissions[0].external
        assert (leg.local, leg.external) == first_hit, leg
    assert sum(leg.generated for leg in usage.legs) == len(completion.token_ids)
    first = usage.legs[0]
    assert first.length == prompt + len(query.so_far)
    found = first.local + first.external
    assert usage.cached_prompt_tokens == (None if query.so_far else found)
    for leg in usage.legs[1:]:
        assert leg.role == "decode"
        assert leg.length == prompt + 1
