"""What is asked of a cluster, and the account that every answer must give of itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from kvrelay import AsyncClient, Completion


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how many tokens are wanted, and from which position on (tokens so far)."""

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
    """How tokens are chosen, the same for all asks."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int


async def _ask_all(
    address: str, asks: Sequence[Ask], at_once: int, sampling: Sampling
) -> list[Completion]:
    room = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def one(ask: Ask) -> Completion:
            async with room:
                return await client.complete(
                    token_ids=ask.prompt,
                    output_token_ids=ask.so_far,
                    max_tokens=ask.max_tokens,
                    seed=ask.seed,
                    timeout=120.0,
                    **sampling,
                )

        return await asyncio.gather(*(one(ask) for ask in asks))


def ask_all(
    address: str, asks: Sequence[Ask], at_once: int = 16, **sampling: Unpack[Sampling]
) -> list[Completion]:
    """The completions, in order; greedy unless told otherwise."""
    chosen: Sampling = {"temperature": 0.0, **sampling}
    return asyncio.run(_ask_all(address, asks, at_once, chosen))


def check_usage(ask: Ask, completion: Completion) -> None:
    """I3, I5 and I6 of docs/accounting.md, leg by leg."""
    usage, prompt = completion.usage, len(ask.prompt)
    assert usage.prompt_tokens == prompt
    assert usage.completion_tokens == len(completion.token_ids) + len(ask.so_far)
    for leg in usage.legs:
        assert leg.local + leg.external + leg.computed == leg.length, leg
        assert leg.computed >= 1, usage
        assert sum(one.tokens for one in leg.external_by_store) == leg.external, leg
        for admission in leg.admissions:
            assert admission.local + admission.external + admission.fresh == admission.length
            assert admission.fresh >= 1
        executed = sum(item.frontier - item.local - item.external for item in leg.admissions)
        assert leg.executed == executed
        own_positions = max(leg.generated - 1, 0)  # the last sampled token's KV is never made
        assert leg.executed == leg.computed + leg.recomputed + own_positions, leg
    assert sum(leg.generated for leg in usage.legs) == len(completion.token_ids)
    first = usage.legs[0]
    assert first.length == prompt + len(ask.so_far)
    assert usage.cached_prompt_tokens == min(first.local + first.external, prompt)
    for leg in usage.legs[1:]:
        assert leg.role == "decode"
        assert leg.length == prompt + 1
