"""Reasoning at real clusters: JSON and calls begin behind it, and the same bytes whoever is killed.

The model has random weights; a bias makes the closing tag likely, and the grammar the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx2
import pytest

from kvrelay import AsyncClient, Chunk, Completion
from kvrelay.client.chunk import completion_of
from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import cluster
from tests.exact.test_tools import PLACE, TOOLS, check_arguments
from tests.models import tiny_model
from tests.router.http.rig import Event, events, follow

PAGE = "/v1/chat/completions"
ROUNDS = 5
OPEN, CLOSE = 257, 258  # token ids
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}assistant:"
    "{% if opened %}<think>\n{% endif %}"
)
SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9},
        "colour": {"enum": ["red", "é"]},
    },
    "required": ["sizes", "colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tags are tokens."""
    made = tiny_model("llama", tmp_path_factory.mktemp("thinks") / "thinks")
    path = made / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    for token, tag in ((OPEN, "<think>"), (CLOSE, "</think>")):
        (old,) = (word for word, number in vocabulary.items() if number == token)
        del vocabulary[old]
        vocabulary[tag] = token
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        content["added_tokens"].append({"id": token, "content": tag, **plain})
    path.write_text(json.dumps(content), "utf-8")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Cluster]:
    """One worker that does everything."""
    with cluster(model, prefill=0, decode=1, num_blocks=1024) as up:
        yield up


@pytest.fixture(scope="module")
def relayed(model: Path) -> Iterator[Cluster]:
    """Two workers of each role."""
    with cluster(model, prefill=2, decode=2, num_blocks=1024, http_port=0) as up:
        yield up


def body(index: int, **changes: object) -> dict[str, object]:
    """Half of the prompts have the tag already; the others are made to begin with it."""
    opened = index % 2 == 1
    return {
        "messages": [{"role": "user", "content": f"Think of {index} things, please."}],
        "max_tokens": 500,
        "seed": 300 + index,
        "temperature": 1.0,
        "logit_bias": {str(CLOSE): 2.5, str(OPEN): 0.0 if opened else 60.0},
        "chat_template_kwargs": {"opened": opened},
        "response_format": FORMAT,
        **changes,
    }


def ask(up: Cluster, indices: Sequence[int], **changes: object) -> list[Completion]:
    async def every() -> list[Completion]:
        async with AsyncClient(up.router) as client:
            made = (client.complete(**body(index, **changes)) for index in indices)  # type: ignore[arg-type]
            return await asyncio.gather(*made)

    return asyncio.run(every())


def shown(made: Sequence[Completion]) -> list[object]:
    return [
        (one.token_ids, one.reasoning, one.text, one.tool_calls, one.finish_reason) for one in made
    ]


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["sizes", "colour"]
    assert 6 <= len(value["sizes"]) <= 9


def test_json_behind_reasoning_and_the_same_when_disaggregated(
    alone: Cluster, relayed: Cluster
) -> None:
    made = ask(alone, range(12))
    ended = [one for one in made if one.finish_reason == "stop"]
    assert len(ended) >= 6
    assert sum(bool(one.reasoning) for one in ended) >= 4
    for one in ended:
        assert CLOSE in one.token_ids
        check_json(one.text)
    assert shown(ask(relayed, range(12))) == shown(made)


def test_calls_behind_reasoning(alone: Cluster, relayed: Cluster) -> None:
    """Forced, and where the answer may be JSON or a call."""
    given: dict[str, object] = {"tools": TOOLS, "response_format": None}
    made = ask(alone, range(6), **given, tool_choice=PLACE)
    ended = [one for one in made if one.finish_reason == "stop"]
    assert len(ended) >= 3
    for one in ended:
        assert one.text == ""
        (call,) = one.tool_calls
        check_arguments(call.name, call.arguments)
    assert shown(ask(relayed, range(6), **given, tool_choice=PLACE)) == shown(made)
    either = ask(alone, range(12), tools=TOOLS)
    reasons = {one.finish_reason for one in either}
    assert reasons & {"stop", "tool_calls"}
    for one in either:
        if one.finish_reason == "stop":
            check_json(one.text)
            assert not one.tool_calls
        elif one.finish_reason == "tool_calls":
            assert one.text == ""
            for call in one.tool_calls:
                check_arguments(call.name, call.arguments)
    assert shown(ask(relayed, range(12), tools=TOOLS)) == shown(either)


@pytest.mark.parametrize("part", ["reasoning", "text"])
def test_a_decode_worker_is_killed(alone: Cluster, model: Path, part: str) -> None:
    """SIGKILL in the middle of the reasoning, and of the JSON."""
    indices = range(8)
    expected = shown(ask(alone, indices))
    with cluster(model, prefill=1, decode=2, num_blocks=1024) as up:
        for _ in range(ROUNDS):
            made = asyncio.run(killed(up, indices, part))
            assert shown(made) == expected
            legs = [leg for one in made for leg in one.usage.legs if leg.role == "decode"]
            if len(legs) > len(made):
                return
            up.wait()  # its streams had ended before the signal arrived: once more
    raise AssertionError(f"no stream was on the worker that was killed, {ROUNDS} times")


async def killed(up: Cluster, indices: Sequence[int], part: str) -> list[Completion]:
    """The answers of streams; a decode worker is killed once one has some of this part."""
    struck = asyncio.Event()

    async def one(client: AsyncClient, index: int) -> Completion:
        chunks: list[Chunk] = []
        async with client.generate(**body(index)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                chunks.append(chunk)
                if len("".join(getattr(one, part) for one in chunks)) > 5 and not struck.is_set():
                    struck.set()
                    up.kill("decode")
        return completion_of(chunks)

    async with AsyncClient(up.router) as client:
        return await asyncio.gather(*(one(client, index) for index in indices))


def joined(found: Sequence[Event]) -> tuple[str, str, str | None]:
    """Reasoning, content and finish reason; the events' borders may differ."""
    reasoning, content, finish = "", "", None
    for _, data in found:
        if data != "[DONE]":
            (choice,) = json.loads(data)["choices"]
            reasoning += choice["delta"].get("reasoning", "")
            content += choice["delta"].get("content", "")
            finish = choice["finish_reason"]
    return reasoning, content, finish


@pytest.mark.parametrize("apart", [6, pytest.param(1, marks=pytest.mark.slow)])
async def test_resumed_at_events(relayed: Cluster, apart: int) -> None:
    """So many events apart; and through a router that is killed."""
    given = body(3, stream=True, max_tokens=120)
    async with httpx2.AsyncClient(base_url=relayed.http or "", timeout=60) as client:
        whole = await events(client, given, PAGE)
        kinds = {key for _, data in whole[:-1] for key in json.loads(data)["choices"][0]["delta"]}
        assert {"reasoning", "content"} <= kinds
        for cut in range(1, len(whole) - 1, apart):
            rest = await events(client, given, PAGE, whole[cut - 1][0])
            assert joined([*whole[:cut], *rest]) == joined(whole), cut
        for _ in range(ROUNDS):
            seen: list[Event] = []
            broken: list[str] = []
            async with asyncio.timeout(150):
                async for data in follow(client, PAGE, given, broken):
                    seen.append(("", data))
                    if len(seen) == 6:
                        relayed.kill("router")
            assert joined(seen) == joined(whole)
            if broken:
                return
    raise AssertionError(f"no stream was broken, {ROUNDS} times")
