"""Reasoning at the router: scripted answers through both doors, resumed at each event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.random_model import save_tokenizer
from kvrelay import AsyncClient
from kvrelay.client.chunk import completion_of
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import types_pb2
from tests.router.fakes import VOCAB
from tests.router.http.rig import events
from tests.router.test_tools import PAGE, SEED, TALK, TOOLS, door, scripted

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    "{% for message in messages %}{% if message.reasoning_content %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\n"
    "{% endfor %}effort {{ reasoning_effort }}\nassistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}"
)
THOUGHTS = "Let me see <b>, é.\n\nSo <tool_call> no."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = f"<think>\n{THOUGHTS}\n</think>\n\nYes.\n{CALL}"
JSON_OBJECT = {"type": "json_object"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose chat template takes tools and has the tags of reasoning."""
    made = tmp_path / "tiny"
    made.mkdir()
    save_tokenizer(made, VOCAB)
    (made / "config.json").write_text(json.dumps({"eos_token_id": 256}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def body(**changes: object) -> dict[str, object]:
    return {"messages": TALK, "tools": TOOLS, "seed": SEED, "max_tokens": 300, **changes}


@pytest.mark.parametrize(
    ("said", "change", "message", "reason"),
    [
        (SAID, {}, {"reasoning": THOUGHTS, "content": "Yes."}, "tool_calls"),
        (SAID, {"n": 2}, {"reasoning": THOUGHTS, "content": "Yes."}, "tool_calls"),
        (SAID, {"include_reasoning": False}, {"content": "Yes."}, "tool_calls"),
        (SAID, {"max_tokens": 20}, {"reasoning": "Let me see <", "content": None}, "length"),
        (SAID, {"stop": ["<b>"]}, {"reasoning": "Let me see", "content": None}, "stop"),
        (f"{THOUGHTS}</think>Yes.", {"chat_template_kwargs": {"opened": True}}, None, "stop"),
        ("Yes.", {}, {"content": "Yes."}, "stop"),
        ("<think>x</think>", {}, {"reasoning": "x", "content": None}, "stop"),
        ("<think>x", {"reasoning_effort": "none"}, {"content": "<think>x"}, "stop"),
    ],
)
async def test_answers(
    folder: Path,
    said: str,
    change: Mapping[str, object],
    message: Mapping[str, object] | None,
    reason: str,
) -> None:
    message = message or {"reasoning": THOUGHTS, "content": "Yes."}
    async with door(folder, scripted(folder, said)) as (_, client):
        made = (await client.post(PAGE, json=body(**change))).json()
        found = await events(client, body(stream=True, **change), PAGE)
    for index, choice in enumerate(made["choices"]):
        given = choice["message"]
        assert {name: given[name] for name in ("reasoning", "content") if name in given} == message
        assert choice["finish_reason"] == reason
        assert bool(given.get("tool_calls")) == (reason == "tool_calls")
        chunks = [json.loads(data) for _, data in found if data != "[DONE]"]
        deltas = [
            one["choices"][0]["delta"] for one in chunks if one["choices"][0]["index"] == index
        ]
        for name in ("reasoning", "content"):
            text = "".join(delta.get(name) or "" for delta in deltas)
            assert text == (message.get(name) or ""), name
        assert not any("content" in delta for delta in deltas[1:] if delta.get("reasoning"))


async def test_through_grpc_and_in_the_next_turn(folder: Path) -> None:
    worker = scripted(folder, SAID)
    async with door(folder, worker) as (router, client), AsyncClient(router.address) as ours:
        made = await ours.complete(messages=TALK, tools=TOOLS, seed=SEED, max_tokens=300)
        assert (made.reasoning, made.text) == (THOUGHTS, "Yes.")
        assert [call.name for call in made.tool_calls] == ["add"]
        turns = [*TALK, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}]
        old = [*TALK, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]
        await ours.complete(messages=turns, max_tokens=3)
        for given in (turns, old):
            asked = {"messages": given, "max_tokens": 3, "reasoning_effort": "high"}
            assert (await client.post(PAGE, json=asked)).status_code == 200
        plain = await ours.complete(prompt="x", seed=SEED, max_tokens=300)
        assert (plain.reasoning, plain.text) == ("", SAID)
    texts = [Tokenizer(folder).decode(leg.prompt_token_ids) for leg in worker.legs]
    assert all("<think>Hm.</think>Yes.\n" in text for text in texts[1:4])
    assert "effort high\n" in texts[2] == texts[3]


async def test_resumed_from_every_event_at_another_router(folder: Path) -> None:
    given = body(stream=True, stream_options={"include_usage": True})
    async with door(folder, scripted(folder, SAID)) as (_, client):
        whole = await events(client, given, PAGE)
    assert len(whole) > 40
    async with door(folder, scripted(folder, SAID, "d1")) as (_, client):
        for cut, (last, _) in enumerate(whole[:-2], 1):
            rest = await events(client, given, PAGE, last)
            assert [data for _, data in rest[:-2]] == [data for _, data in whole[cut:-2]], cut
            assert rest[-1] == whole[-1]


@pytest.mark.parametrize("after", range(3, 100, 19))
async def test_a_worker_dies_in_the_reasoning(folder: Path, after: int) -> None:
    given = {"messages": TALK, "tools": TOOLS, "seed": SEED, "max_tokens": 300}
    dying = scripted(folder, SAID, die_after=after), scripted(folder, SAID, "d1", die_after=after)
    calm = scripted(folder, SAID, "d2")
    async with (
        door(folder, *dying, calm, max_deaths=9) as (router, _),
        AsyncClient(router.address) as ours,
    ):
        made = await asyncio.gather(*(ours.complete(**given) for _ in range(6)))  # type: ignore[arg-type]
        stream = ours.generate(**given)  # type: ignore[arg-type]
        begun = [await anext(stream) for _ in range(after)]
        stream.cancel()
        made.append(completion_of([*begun, *[chunk async for chunk in ours.resume(stream)]]))
    assert {(one.reasoning, one.text) for one in made} == {(THOUGHTS, "Yes.")}
    assert dying[0].legs or dying[1].legs


@pytest.mark.parametrize(
    ("kwargs", "reasoning"),
    [
        ({}, types_pb2.REASONING_OPTIONAL),
        ({"opened": True}, types_pb2.REASONING_OPEN),
        ({"enable_thinking": False}, types_pb2.REASONING_UNSPECIFIED),
    ],
)
async def test_what_binds_the_answer(
    folder: Path, kwargs: Mapping[str, object], reasoning: types_pb2.Reasoning.ValueType
) -> None:
    """A grammar begins behind the reasoning; with tools that may be called, it has the calls."""
    worker = scripted(folder, SAID)
    asked: tuple[dict[str, object], ...] = (
        {"response_format": JSON_OBJECT, "tools": None},
        {"response_format": JSON_OBJECT},
        {"response_format": JSON_OBJECT, "tool_choice": "none"},
        {"response_format": JSON_OBJECT, "tool_choice": "required"},
        {"tool_choice": "required"},
        {},
    )
    async with door(folder, worker) as (_, client):
        for change in asked:
            made = await client.post(PAGE, json=body(chat_template_kwargs=kwargs, **change))
            assert made.status_code == 200, made.text
    bound = [leg.sampling.structured_output for leg in worker.legs]
    assert [one.reasoning for one in bound[:5]] == [reasoning] * 5
    assert [one.WhichOneof("constraint") for one in bound] == [
        *("json_object", "json_object", "json_object", "grammar", "grammar", None)
    ]
    assert [bool(one.calls) for one in bound] == [False, True, False, False, False, False]
    assert bound[1].calls == bound[3].grammar == bound[4].grammar


async def test_formats(folder: Path) -> None:
    async with door(folder, scripted(folder, SAID), reasoning_format="none") as (_, client):
        made = (await client.post(PAGE, json=body(tools=None))).json()["choices"][0]["message"]
        assert (made["content"], "reasoning" in made) == (SAID, False)
        wrong = await client.post(PAGE, json=body(reasoning_effort="much"))
        assert wrong.json()["error"]["param"] == "reasoning_effort"
        wrong = await client.post(PAGE, json=body(include_reasoning=1))
        assert wrong.json()["error"]["param"] == "include_reasoning"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for wanted, reasoning in (("auto", None), ("think", THOUGHTS)):
        workers = scripted(folder, SAID, f"d-{wanted}")
        async with door(folder, workers, reasoning_format=wanted) as (_, client):
            made = (await client.post(PAGE, json=body(tools=None))).json()["choices"][0]["message"]
            assert made.get("reasoning") == reasoning


async def test_calls_that_begin_as_json_does(folder: Path) -> None:
    """Of Llama's format; the other choices are served."""
    asked = body(response_format=JSON_OBJECT)
    async with door(folder, scripted(folder, SAID), tool_format="llama") as (_, client):
        made = await client.post(PAGE, json=asked)
        assert made.status_code == 400
        assert made.json()["error"]["param"] == "response_format"
        for choice in ("none", "required"):
            made = await client.post(PAGE, json={**asked, "tool_choice": choice})
            assert made.status_code == 200, made.text
