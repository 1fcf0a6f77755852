"""Real processes: the router is killed in the middle of streams, which go on with the same bytes.

So is the decode worker of several prompts: their client does not notice.
``follow`` of the rig is all that a client needs beside an HTTP library: it remembers the id of the
last event and sends the same request again with it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from benchmarks.random_model import make_model
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.process import RestartBackoff
from kvrelay.cluster.supervisor import Cluster
from router.generate.retry import SERVED_WELL
from tests.router.http.rig import follow

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TOKENS = 1500  # many more than a client can be behind when it kills, on a machine with other work
KILL_AT = {
    "router": (3, 40, 90),  # events of the stream
    # Tokens of the choice that has fewest: after so many a death is not laid to the request.
    "decode": (SERVED_WELL + 8, SERVED_WELL + 200),
}
TALK = [{"role": "user", "content": "Hi"}]
MANY = {"type": "array", "items": {"type": "integer"}, "minItems": 900}
SCHEMA = {"type": "object", "properties": {"numbers": MANY}, "required": ["numbers"]}
CALL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CHATS: dict[str, dict[str, object]] = {
    "choices": {"n": 3, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    "calls": {"tools": [CALL], "tool_choice": "required"},
    "an object": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA},
        }
    },
}
Choice = tuple[str, str, list[int], list[float], str | None]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model: Path = make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")
    config = ClusterConfig(
        model=str(model), port=0, http_port=0, num_blocks=256, store_budget=64 << 20, threads=1
    )
    with Cluster(config, backoff=RestartBackoff(first=0.05, longest=0.2)) as made:
        yield made


def content(data: list[str]) -> list[Choice]:
    """Text, calls, tokens, log probabilities and finish reason of each choice.

    The events' borders may differ.
    """
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    found: dict[int, Choice] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, calls, tokens, logprobs, _ = found.get(choice["index"], ("", "", [], [], None))
            delta = choice.get("delta", {"content": choice.get("text")})
            for call in delta.get("tool_calls", ()):
                named = call.get("id", "") + call["function"].get("name", "")
                calls += named + call["function"]["arguments"]
            reported = (choice["logprobs"] or {}).get("content", ())
            found[choice["index"]] = (
                text + delta.get("content", ""),
                calls,
                tokens + (choice.get("token_ids") or []),
                logprobs + [one["logprob"] for one in reported],
                choice["finish_reason"],
            )
    return [found[index] for index in sorted(found)]


def lengths(data: str) -> dict[int, int]:
    """How many tokens an event has of each choice."""
    choices = [] if data == "[DONE]" else json.loads(data)["choices"]
    return {choice["index"]: len(choice.get("token_ids") or ()) for choice in choices}


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
    whole = await check_killed(cluster, "/v1/completions", body)
    assert len(whole[0][2]) == TOKENS


@pytest.mark.parametrize("kind", CHATS)
async def test_so_do_those_of_chats(cluster: Cluster, kind: str) -> None:
    body = {
        **CHATS[kind],
        "messages": TALK,
        "max_tokens": TOKENS,
        "seed": 12,
        "stream": True,
        "return_token_ids": True,
    }
    whole = await check_killed(cluster, "/v1/chat/completions", body)
    assert all(len(tokens) == TOKENS for _, _, tokens, _, _ in whole)
    assert bool(whole[0][1]) == (kind == "calls")
    assert bool(whole[0][3]) == (kind == "choices")


@pytest.mark.parametrize("role", KILL_AT)
async def test_so_do_those_of_two_samples_of_two_prompts(cluster: Cluster, role: str) -> None:
    body = {
        "prompt": ["Once upon a time there was", list(range(40, 90))],
        "n": 2,
        "max_tokens": TOKENS,
        "seed": 13,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = await check_killed(cluster, "/v1/completions", body, role)
    assert [len(tokens) for _, _, tokens, _, _ in whole] == [TOKENS] * 4
    assert len({tuple(tokens) for _, _, tokens, _, _ in whole}) == 4


async def check_killed(
    cluster: Cluster, page: str, body: dict[str, object], role: str = "router"
) -> list[Choice]:
    """A stream whose router or worker is killed again and again has the content of an undisturbed
    one.
    """
    kill_at, breaks = KILL_AT[role], role == "router"
    async with httpx2.AsyncClient(base_url=cluster.http or "", timeout=60) as client:
        whole = content([data async for data in follow(client, page, body, [])])
        seen: list[str] = []
        broken: list[str] = []
        killed = 0
        received = Counter[int](dict.fromkeys(range(len(whole)), 0))
        async with asyncio.timeout(150):
            async for data in follow(client, page, body, broken):
                seen.append(data)
                received.update(lengths(data))
                if killed == len(kill_at) or (breaks and len(broken) < killed):
                    continue  # events sent before a kill still arrive after it
                if (len(seen) if breaks else min(received.values())) >= kill_at[killed]:
                    cluster.kill(role)
                    killed += 1
        assert killed == len(kill_at)
        assert len(broken) == killed * breaks
        assert content(seen) == whole
        assert len({json.loads(data)["id"] for data in seen if data != "[DONE]"}) == 1
    return whole
