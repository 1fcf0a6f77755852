"""Real processes: decode workers are killed while four samples of one prompt stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay import AsyncClient
from router.generate.retry import SERVED_WELL
from tests.exact.idle import check_idle
from tests.failures.rig import rig
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SAMPLES = 4
TOKENS = 150
# Of the slowest sample: after so many tokens the first death is not laid to the request.
KILL_AT = (SERVED_WELL + 8, SERVED_WELL + 48)
PROMPT = tuple(range(3, 60))


async def _samples(
    address: str, kills: list[int], kill: Callable[[], None]
) -> dict[int, list[int]]:
    """The tokens of each sample; ``kill`` is called when all have as many as ``kills`` say."""
    found: dict[int, list[int]] = {index: [] for index in range(SAMPLES)}
    async with AsyncClient(address) as client:
        stream = client.generate(
            token_ids=PROMPT,
            n=SAMPLES,
            max_tokens=TOKENS,
            temperature=0.8,
            seed=11,
            ignore_eos=True,
            timeout=120,
        )
        usage = None
        async for chunk in stream:
            found[chunk.index] += chunk.token_ids
            usage = chunk.usage or usage
            if kills and min(map(len, found.values())) >= kills[0]:
                kills.pop(0)
                kill()
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.completion_tokens == SAMPLES * TOKENS
    return found


def test_each_sample_has_the_tokens_of_an_undisturbed_run(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "llama", eos_token_id=None)
    with rig(model, seqs=8) as stand:
        address, kills = stand.cluster.router, list(KILL_AT)
        at = iter((0, 1))
        disturbed = asyncio.run(
            _samples(address, kills, lambda: stand.cluster.kill("decode", next(at)))
        )
        assert not kills, "the samples ended before their worker was killed"
        stand.settle()
        undisturbed = asyncio.run(_samples(address, [], stand.settle))
        assert disturbed == undisturbed
        assert len({tuple(tokens) for tokens in disturbed.values()}) == SAMPLES
        check_idle(stand.cluster, 15.0)
