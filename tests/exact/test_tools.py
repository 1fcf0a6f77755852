"""Function calling at real clusters: forced calls are valid, and the same bytes whoever is killed.

The model has random weights: what makes its calls valid is the grammar alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from kvrelay import AsyncClient, Chunk, Completion
from kvrelay.client.chunk import completion_of
from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.router.http.rig import events, follow

KIND = "llama"
MADE = 400
ROUNDS = 5
PAGE = "/v1/chat/completions"
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "place",
            "description": "Places things.",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 9999},
                        "minItems": 12,
                        "maxItems": 20,
                    },
                    "colour": {"enum": ["red", "deep blue", "é"]},
                },
                "required": ["at", "colour"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
PLACE = {"type": "function", "function": {"name": "place"}}
Calls = list[tuple[str, str, str]]


def talk(index: int) -> list[dict[str, object]]:
    return [{"role": "user", "content": f"Place the {index} things of the table, please."}]


def body(index: int, **changes: object) -> dict[str, object]:
    return {
        "messages": talk(index),
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": MADE,
        "seed": 100 + index,
        **changes,
    }


def check_arguments(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "stop":
        assert value == {}
        return
    assert name == "place"
    assert list(value) == ["at", "colour"]
    assert 12 <= len(value["at"]) <= 20
    assert all(type(one) is int and 0 <= one <= 9999 for one in value["at"])
    assert value["colour"] in ("red", "deep blue", "é")


@pytest.fixture(scope="module")
def alone(models: Models) -> Iterator[Cluster]:
    """One worker that does everything."""
    with cluster(models(KIND), prefill=0, decode=1, num_blocks=1024, http_port=0) as up:
        yield up


@pytest.fixture(scope="module")
def relayed(models: Models) -> Iterator[Cluster]:
    """Two workers of each role."""
    with cluster(models(KIND), prefill=2, decode=2, num_blocks=1024, http_port=0) as up:
        yield up


def sdk(up: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{up.http}/v1", api_key="none", max_retries=0)


def ask(up: Cluster, indices: Sequence[int], **changes: object) -> list[Completion]:
    """Our own client's answers, all at once."""

    async def every() -> list[Completion]:
        async with AsyncClient(up.router) as client:
            made = (client.complete(**body(index, **changes)) for index in indices)  # type: ignore[arg-type]
            return await asyncio.gather(*made)

    return asyncio.run(every())


def shown(made: Sequence[Completion]) -> list[object]:
    return [(one.token_ids, one.text, one.tool_calls, one.finish_reason) for one in made]


@pytest.mark.slow
def test_valid_and_the_same_when_disaggregated(alone: Cluster, relayed: Cluster) -> None:
    for choice, reason in (("required", "tool_calls"), (PLACE, "stop")):
        made = ask(alone, range(10), tool_choice=choice)
        ended = [one for one in made if one.finish_reason == reason]
        assert len(ended) >= 5
        assert all(one.finish_reason in (reason, "length") for one in made)
        for one in ended:
            assert one.text == ""
            assert one.tool_calls
            for call in one.tool_calls:
                check_arguments(call.name, call.arguments)
        assert shown(ask(relayed, range(10), tool_choice=choice)) == shown(made)
    check_idle(relayed)


def test_openai_s_client(relayed: Cluster) -> None:
    """Whole, streamed and through gRPC: the same calls."""
    with sdk(relayed) as client:
        made = client.chat.completions.create(model="llama", **body(1, tool_choice=PLACE))  # type: ignore[call-overload]
        (call,) = made.choices[0].message.tool_calls
        check_arguments(call.function.name, call.function.arguments)
        assert made.choices[0].message.content is None
        with client.chat.completions.stream(model="llama", **body(1, tool_choice=PLACE)) as stream:  # type: ignore[arg-type]
            parts = [event for event in stream if "arguments.delta" in event.type]
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert len(parts) > 1, "tokens that come at once may share a chunk"
        assert streamed is not None
        same = [(one.id, one.function.name, one.function.arguments) for one in streamed]
        assert same == [(call.id, call.function.name, call.function.arguments)]
        (ours,) = ask(relayed, [1], tool_choice=PLACE)
        assert [(one.id, one.name, one.arguments) for one in ours.tool_calls] == same
        turns = [
            *talk(1),
            made.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        free = client.chat.completions.create(
            model="llama",
            **body(1, messages=turns, tool_choice="auto", max_tokens=20),  # type: ignore[call-overload]
        )
        assert free.choices[0].finish_reason in ("length", "stop")
        assert free.choices[0].message.tool_calls is None
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(model="llama", **body(1, messages=turns[::2]))  # type: ignore[call-overload]
        assert caught.value.param == "messages[1].tool_call_id"


async def test_openai_s_client_for_asyncio(relayed: Cluster) -> None:
    url = f"{relayed.http}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="llama",
                    **body(index, parallel_tool_calls=False),  # type: ignore[call-overload]
                )
                for index in range(4)
            )
        )
    for one in made:
        (call,) = one.choices[0].message.tool_calls
        check_arguments(call.function.name, call.function.arguments)


def test_a_decode_worker_is_killed_in_a_call(alone: Cluster, models: Models) -> None:
    """SIGKILL in the middle of arguments; the client sees a pause."""
    indices = range(8)
    expected = shown(ask(alone, indices, tool_choice=PLACE))
    with cluster(models(KIND), prefill=1, decode=2, num_blocks=1024) as up:
        for _ in range(ROUNDS):
            made = asyncio.run(killed(up, indices))
            assert shown(made) == expected
            legs = [leg for one in made for leg in one.usage.legs if leg.role == "decode"]
            if len(legs) > len(made):
                return
            up.wait()  # its streams had ended before the signal arrived: once more
    raise AssertionError(f"no stream was on the worker that was killed, {ROUNDS} times")


async def killed(up: Cluster, indices: Sequence[int]) -> list[Completion]:
    """The answers of streams; a decode worker is killed once one has some arguments."""
    struck = asyncio.Event()

    async def one(client: AsyncClient, index: int) -> Completion:
        chunks: list[Chunk] = []
        async with client.generate(**body(index, tool_choice=PLACE)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                chunks.append(chunk)
                so_far = "".join(part.arguments for one in chunks for part in one.tool_calls)
                if len(so_far) > 20 and not struck.is_set():
                    struck.set()
                    up.kill("decode")
        return completion_of(chunks)

    async with AsyncClient(up.router) as client:
        return await asyncio.gather(*(one(client, index) for index in indices))


def calls_of(data: Sequence[str]) -> tuple[Calls, list[Mapping[str, object]]]:
    """The calls of a stream, and its other deltas."""
    calls: Calls = []
    others: list[Mapping[str, object]] = []
    for one in data:
        if one == "[DONE]":
            continue
        (choice,) = json.loads(one)["choices"]
        delta = choice["delta"]
        for part in delta.get("tool_calls") or ():
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append((part["id"], part["function"]["name"], ""))
            known, name, arguments = calls[part["index"]]
            calls[part["index"]] = known, name, arguments + part["function"]["arguments"]
        if "tool_calls" not in delta:
            others.append({**delta, "finish_reason": choice["finish_reason"]})
    return calls, others


async def test_the_router_is_killed_in_a_call(relayed: Cluster) -> None:
    """The client resumes with the id of the last event."""
    given = body(3, stream=True, tool_choice=PLACE)
    async with httpx2.AsyncClient(base_url=relayed.http or "", timeout=60) as client:
        whole = [data for _, data in await events(client, given, PAGE)]
        ((_, name, arguments),), _ = calls_of(whole)
        check_arguments(name, arguments)
        for _ in range(ROUNDS):
            seen: list[str] = []
            broken: list[str] = []
            struck = False
            async with asyncio.timeout(150):
                async for data in follow(client, PAGE, given, broken):
                    seen.append(data)
                    ((*_, so_far),) = calls_of(seen)[0] or [("", "", "")]
                    if len(so_far) > 12 and not struck:
                        struck = True
                        relayed.kill("router")
            assert calls_of(seen) == calls_of(whole)
            if broken:
                return
    raise AssertionError(f"no stream was broken, {ROUNDS} times")
