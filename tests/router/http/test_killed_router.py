"""Real processes: the router is killed in the middle of streams, which go on with the same bytes.

``follow`` of the rig is all that a client needs beside an HTTP library: it remembers the id of the
last event and sends the same request again with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from benchmarks.random_model import make_model
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.process import RestartBackoff
from kvrelay.cluster.supervisor import Cluster
from tests.router.http.rig import follow

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TOKENS = 1500  # many more than a client can be behind when it kills, on a machine with other work
KILL_AT = (3, 40, 90)  # events of the first stream


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model: Path = make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")
    config = ClusterConfig(
        model=str(model), port=0, http_port=0, num_blocks=256, store_budget=64 << 20, threads=1
    )
    with Cluster(config, backoff=RestartBackoff(first=0.05, longest=0.2)) as made:
        yield made


def content(data: list[str]) -> list[tuple[str, list[int], str | None]]:
    """Text, tokens and finish reason of each choice; the events' borders may differ."""
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    found: dict[int, tuple[str, list[int], str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, tokens, _ = found.get(choice["index"], ("", [], None))
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            tokens = tokens + (choice.get("token_ids") or [])
            found[choice["index"]] = text + new, tokens, choice["finish_reason"]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_streams_survive_the_death_of_the_router(
    cluster: Cluster, temperature: float
) -> None:
    body = {
        "prompt": "Once upon a time there was",
        "max_tokens": TOKENS,
        "temperature": temperature,
        "seed": 11,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with httpx2.AsyncClient(base_url=cluster.http or "", timeout=60) as client:
        page = "/v1/completions"
        whole = content([data async for data in follow(client, page, body, [])])
        assert len(whole[0][1]) == TOKENS
        seen: list[str] = []
        broken: list[str] = []
        killed = 0
        async with asyncio.timeout(150):
            async for data in follow(client, page, body, broken):
                seen.append(data)
                noticed = len(broken) == killed  # events sent before a kill still arrive after it
                if noticed and killed < len(KILL_AT) and len(seen) >= KILL_AT[killed]:
                    cluster.kill("router")
                    killed += 1
        assert len(broken) == killed == len(KILL_AT)
        assert content(seen) == whole
        assert len({json.loads(data)["id"] for data in seen if data != "[DONE]"}) == 1
