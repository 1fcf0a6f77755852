"""Function calling at the router: scripted answers through both doors, errors, resumption."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest

from benchmarks.random_model import save_tokenizer
from kvrelay import AsyncClient, ToolCall
from kvrelay.client.chunk import completion_of
from kvrelay.errors import Rejected
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2, types_pb2
from tests.router.fakes import LENGTH, STOP, VOCAB, Behaviour, FakeWorker, Running, running
from tests.router.http.rig import events, openai_of
from tests.router.rig import failing

SEED = 7
EOS = 256
PAGE = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
STOPS = {"type": "function", "function": {"name": "stop"}}
TOOLS = [ADD, STOPS]
NAMED = {"type": "function", "function": {"name": "stop"}}
TALK = [{"role": "user", "content": "Hi"}]
TWO = (
    'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
CALLS = [("add", '{"a": 1, "b": "é"}'), ("stop", "{}")]
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "é"}}; {"name": "stop", "parameters": {}}'


@dataclass(slots=True)
class Scripted(FakeWorker):
    """Answers everything with the same tokens; the last one ends the answer."""

    script: tuple[int, ...] = ()

    async def _tokens(
        self, leg: types_pb2.Leg, most: int
    ) -> AsyncGenerator[tuple[types_pb2.Token, types_pb2.FinishReason.ValueType]]:
        self.legs.append(leg)
        for made, index in enumerate(range(len(leg.output_token_ids), len(self.script))):
            if self.behaviour.die_after == made:
                await self._die(self.behaviour)
                await asyncio.sleep(30)
            finish = types_pb2.FINISH_REASON_UNSPECIFIED
            if index == len(self.script) - 1:
                finish = STOP
            elif index == leg.max_tokens - 1:
                finish = LENGTH
            yield types_pb2.Token(id=self.script[index]), finish
            if finish:
                return


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose chat template takes tools."""
    made = tmp_path / "tiny"
    made.mkdir()
    save_tokenizer(made, VOCAB)
    (made / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return made


def scripted(folder: Path, text: str, boot: str = "d0", **behaviour: object) -> Scripted:
    """A decode worker that says this."""
    script = (*Tokenizer(folder).encode(text, add_special_tokens=False), EOS)
    does = Behaviour(**behaviour)  # type: ignore[arg-type]
    return Scripted(types_pb2.ROLE_DECODE, boot, num_blocks=1000, script=script, behaviour=does)


@asynccontextmanager
async def door(
    folder: Path, *workers: FakeWorker, **changes: object
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A router with a door in front of the workers, and a plain client of it."""
    given = {"model": str(folder), "http_port": 0, "disaggregate": "never", **changes}
    async with (
        running(workers or [scripted(folder, TWO)], **given) as router,  # type: ignore[arg-type]
        httpx2.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        yield router, client


def body(**changes: object) -> dict[str, object]:
    return {"messages": TALK, "tools": TOOLS, "seed": SEED, "max_tokens": 300, **changes}


def pairs(calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


async def test_an_answer_with_calls(folder: Path) -> None:
    async with door(folder) as (router, _), openai_of(router) as sdk:
        made = await sdk.chat.completions.create(model="tiny", **body())  # type: ignore[call-overload]
        (choice,) = made.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Well."
        calls = choice.message.tool_calls
        assert [(one.function.name, one.function.arguments) for one in calls] == CALLS
        assert [one.type for one in calls] == ["function", "function"]
        assert len({one.id for one in calls}) == 2
        assert all(one.id.startswith("call_") for one in calls)
        again = await sdk.chat.completions.create(model="tiny", **body())  # type: ignore[call-overload]
        assert again.choices[0].message == choice.message
        other = await sdk.chat.completions.create(model="tiny", **body(seed=8))  # type: ignore[call-overload]
        assert other.choices[0].message.tool_calls[0].id != calls[0].id


async def test_a_stream_is_accumulated_to_the_same(folder: Path) -> None:
    async with door(folder) as (router, _), openai_of(router) as sdk:
        made = await sdk.chat.completions.create(model="tiny", **body())  # type: ignore[call-overload]
        async with sdk.chat.completions.stream(model="tiny", **body()) as stream:  # type: ignore[arg-type]
            kinds = {event.type async for event in stream}
            final = (await stream.get_final_completion()).choices[0]
        assert {"tool_calls.function.arguments.delta", "content.delta"} <= kinds
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Well."
        assert [
            (one.id, one.function.name, one.function.arguments)
            for one in final.message.tool_calls or ()
        ] == [
            (one.id, one.function.name, one.function.arguments)
            for one in made.choices[0].message.tool_calls
        ]


async def test_deltas_on_the_wire(folder: Path) -> None:
    async with door(folder) as (_, client):
        found = await events(client, body(stream=True), PAGE)
    choices = [json.loads(data)["choices"][0] for _, data in found if data != "[DONE]"]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "tool_calls"
    deltas = [one["delta"]["tool_calls"] for one in choices if "tool_calls" in one["delta"]]
    assert all(len(one) == 1 for one in deltas)
    first, *rest = [one[0] for one in deltas]
    assert first["type"] == "function"
    assert first["function"] == {"name": "add", "arguments": "{"}
    assert rest[0] == {"index": 0, "function": {"arguments": '"'}}
    assert [one["index"] for one in (first, *rest) if "id" in one] == [0, 1]
    assert not any(one["delta"].get("content") == "" for one in choices[1:])


@pytest.mark.parametrize(
    ("change", "content", "calls", "reason"),
    [
        ({"tool_choice": "none"}, TWO, None, "stop"),
        ({"tools": None}, TWO, None, "stop"),
        ({"tools": [], "tool_choice": "auto"}, TWO, None, "stop"),
        ({"parallel_tool_calls": False}, "Well.", CALLS[:1], "tool_calls"),
        ({"max_tokens": 55}, "Well.", [("add", '{"a": 1,')], "length"),
        ({"tool_choice": "required"}, "Well.", CALLS, "tool_calls"),
        ({"tool_choice": NAMED}, "Well.", CALLS, "stop"),
        ({"stop": ["</tool_call>"]}, "Well.", CALLS[:1], "tool_calls"),
        ({"stop": ['1, "b']}, "Well.", [("add", '{"a": ')], "stop"),
        ({"n": 2}, "Well.", CALLS, "tool_calls"),
    ],
)
async def test_choices(
    folder: Path,
    change: Mapping[str, object],
    content: str,
    calls: list[tuple[str, str]] | None,
    reason: str,
) -> None:
    async with door(folder) as (_, client):
        made = (await client.post(PAGE, json=body(**change))).json()
    for choice in made["choices"]:
        assert choice["finish_reason"] == reason
        message = choice["message"]
        assert message["content"] == content
        functions = [one["function"] for one in message.get("tool_calls") or ()]
        assert [(one["name"], one["arguments"]) for one in functions] == (calls or [])
        assert ("tool_calls" in message) == (calls is not None)
    ids = [one["id"] for each in made["choices"] for one in each["message"].get("tool_calls") or ()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("most", [1, 3, 12])
async def test_a_call_that_is_cut_before_its_name_is_no_text(
    folder: Path, choice: object, most: int
) -> None:
    text = TWO.removeprefix("Well.\n")
    async with door(folder, scripted(folder, text)) as (_, client):
        asked = body(tool_choice=choice, max_tokens=most)
        (made,) = (await client.post(PAGE, json=asked)).json()["choices"]
    assert made["finish_reason"] == "length"
    assert "tool_calls" not in made["message"]
    content = made["message"]["content"]
    assert content and text.startswith(content) if choice == "auto" else not content


async def test_llama(folder: Path) -> None:
    async with door(folder, scripted(folder, LLAMA), tool_format="llama") as (_, client):
        made = (await client.post(PAGE, json=body(tool_choice="required"))).json()["choices"][0]
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["content"] is None
    functions = [one["function"] for one in made["message"]["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == CALLS


async def test_what_the_model_and_the_workers_get(folder: Path) -> None:
    """The template sees tools, calls and results as OpenAI's API has them."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns: list[dict[str, object]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    worker = scripted(folder, TWO)
    async with door(folder, worker) as (router, client), AsyncClient(router.address) as ours:
        given = body(messages=turns, tool_choice="required", seed=1)
        made = (await client.post(PAGE, json=given)).json()
        assert made["choices"][0]["finish_reason"] == "tool_calls"
        same = await ours.complete(
            messages=turns, tools=TOOLS, tool_choice="required", seed=1, max_tokens=300
        )
        assert pairs(same.tool_calls) == CALLS
        count = (await client.post("/tokenize", json={"messages": turns, "tools": TOOLS})).json()
    http, grpc = worker.legs
    assert http.prompt_token_ids == grpc.prompt_token_ids == count["tokens"]
    assert http.sampling.structured_output == grpc.sampling.structured_output
    assert "%json" in http.sampling.structured_output.grammar
    text = Tokenizer(folder).decode(http.prompt_token_ids)
    assert '"name": "add", "description": "Adds.", "parameters": {"type": "object"' in text
    assert '{"name": "add", "arguments": {"a": 2}}' in text
    assert "tool: 3\n" in text
    assert "strict" not in text


async def test_through_grpc(folder: Path) -> None:
    async with door(folder) as (router, client), AsyncClient(router.address) as ours:
        made = await ours.complete(messages=TALK, tools=TOOLS, seed=SEED, max_tokens=300)
        assert (made.text, made.finish_reason) == ("Well.", "tool_calls")
        assert pairs(made.tool_calls) == pairs(made.choices[0].tool_calls) == CALLS
        http = (await client.post(PAGE, json=body())).json()["choices"][0]["message"]
        assert [one["id"] for one in http["tool_calls"]] == [one.id for one in made.tool_calls]


async def test_resumed_from_every_event_at_another_router(folder: Path) -> None:
    given = body(stream=True, stream_options={"include_usage": True})
    async with door(folder) as (_, client):
        whole = await events(client, given, PAGE)
    assert len(whole) > 25
    async with door(folder, scripted(folder, TWO, "d1")) as (_, client):
        for cut, (last, _) in enumerate(whole[:-2], 1):
            rest = await events(client, given, PAGE, last)
            assert [data for _, data in rest[:-2]] == [data for _, data in whole[cut:-2]], cut
            assert rest[-1] == whole[-1]


@pytest.mark.parametrize("after", range(5, 100, 17))
async def test_a_worker_dies_in_a_call(folder: Path, after: int) -> None:
    """And a client of gRPC resumes at any chunk."""
    workers = scripted(folder, TWO, die_after=after), scripted(folder, TWO, "d1", die_after=after)
    calm = scripted(folder, TWO, "d2")
    given = {"messages": TALK, "tools": TOOLS, "seed": SEED, "max_tokens": 300}
    async with door(folder, calm) as (router, _), AsyncClient(router.address) as ours:
        whole = await ours.complete(**given)  # type: ignore[arg-type]
        stream = ours.generate(**given)  # type: ignore[arg-type]
        begun = [await anext(stream) for _ in range(after)]
        stream.cancel()
        rest = [chunk async for chunk in ours.resume(stream)]
        resumed = completion_of([*begun, *rest])
        assert (resumed.text, resumed.tool_calls) == (whole.text, whole.tool_calls)
    calm = scripted(folder, TWO, "d3")
    async with (
        door(folder, *workers, calm, max_deaths=9) as (router, _),
        AsyncClient(router.address) as ours,
    ):
        made = await asyncio.gather(*(ours.complete(**given) for _ in range(6)))  # type: ignore[arg-type]
        assert {(one.text, one.tool_calls) for one in made} == {(whole.text, whole.tool_calls)}
    assert workers[0].legs or workers[1].legs


def function(**changes: object) -> dict[str, object]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def calling(**changes: object) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return {"messages": [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


RESULT = {"role": "tool", "content": "x"}
TOO_MANY = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]
WRONG: dict[str, tuple[dict[str, object], str, str]] = {
    "tools text": ({"tools": "x"}, "tools", "must be a list of functions, got 'x'"),
    "deep": (
        {"tools": [json.loads("[" * 400 + "]" * 400)]},
        "tools[0]",
        "an object with type and function, which has a name, got [[[",
    ),
    "tool text": ({"tools": ["x"]}, "tools[0]", "an object with type and function"),
    "kind": (
        {"tools": [{"type": "custom", "custom": {}}]},
        "tools[0].type",
        "'custom' is not served: must be function",
    ),
    "129 tools": ({"tools": TOO_MANY}, "tools", "at most 128, got 129: offer fewer"),
    "large": (
        function(description="x" * 300_000),
        "tools",
        "300001 bytes, more than the limit of 262144",
    ),
    "longer than the model": (
        function(description="x" * 200_000),
        "tools",
        "positions of the largest worker hold",
    ),
    "name": (function(name="a b"), "tools[0].function.name", "letters, digits, _ and -"),
    "name number": (function(name=3), "tools[0].function.name", "must be text, got 3"),
    "twice": ({"tools": [ADD, ADD]}, "tools[1].function.name", "'add' is tools[0] too"),
    "description": (function(description=3), "tools[0].function.description", "must be text"),
    "parameters": (function(parameters=[]), "tools[0].function.parameters", "got []"),
    "array": (
        function(parameters={"type": "array"}),
        "tools[0].function.parameters",
        'a JSON schema with type "object"',
    ),
    "surrogate": (
        function(parameters={"description": "\ud800"}),
        "tools[0].function.parameters",
        "surrogate",
    ),
    "strict": (function(strict="yes"), "tools[0].function.strict", "must be true or false"),
    "not enforceable": (
        {**function(parameters={"type": "object", "not": {}}), "tool_choice": "required"},
        "tools[0].function.parameters",
        'cannot be enforced: Unimplemented keys: ["not"]: change it, or use auto',
    ),
    "large grammar": (
        {**function(parameters={"description": "x" * 70_000}), "tool_choice": "required"},
        "tool_choice",
        "more than the limit of 65536: name one function, or use auto",
    ),
    "choice": ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required, or"),
    "choice kind": (
        {"tool_choice": {"type": "allowed_tools"}},
        "tool_choice",
        "must be none, auto, required, or",
    ),
    "choice name": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "'f' is none of the tools: add, stop",
    ),
    "choice alone": (
        {"tools": None, "tool_choice": "required"},
        "tool_choice",
        "'required' needs tools",
    ),
    "parallel": ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    "schema with a format": (
        {
            **function(parameters={"type": "object", "not": {}}),
            "response_format": {"type": "json_object"},
        },
        "tools[0].function.parameters",
        "change it, or leave out response_format",
    ),
    "template arguments": (
        {"chat_template_kwargs": 5},
        "chat_template_kwargs",
        "must be an object, got 5",
    ),
    "template arguments of ours": (
        {"chat_template_kwargs": {"tools": 5}},
        "chat_template_kwargs.tools",
        "is set by this server",
    ),
    "schema of a format": (
        {
            "tools": None,
            "response_format": {"type": "json_schema", "json_schema": {"schema": False}},
        },
        "response_format.json_schema.schema",
        "schema is false",
    ),
    "structured outputs": (
        {"tools": None, "structured_outputs": {"regex": "("}},
        "structured_outputs.regex",
        "unclosed group",
    ),
    "calls text": (
        {"messages": [*TALK, {"role": "assistant", "tool_calls": "x"}]},
        "messages[1].tool_calls",
        "must be a list of calls",
    ),
    "call": (calling(id=None), "messages[1].tool_calls[0].id", "must be text, got None"),
    "call function": (
        calling(function={"name": "f"}),
        "messages[1].tool_calls[0]",
        "name, arguments",
    ),
    "arguments": (
        calling(function={"name": "f", "arguments": "{"}),
        "messages[1].tool_calls[0].function.arguments",
        "is not JSON",
    ),
    "arguments list": (
        calling(function={"name": "f", "arguments": "[]"}),
        "messages[1].tool_calls[0].function.arguments",
        "must be a JSON object as text, got '[]'",
    ),
    "result alone": (
        {"messages": [*TALK, RESULT]},
        "messages[1].tool_call_id",
        "must be the id of a call of an earlier message, got ''",
    ),
    "result of another": (
        {"messages": [*TALK, {**RESULT, "tool_call_id": "z"}]},
        "messages[1].tool_call_id",
        "got 'z'",
    ),
}


async def test_each_wrong_field_is_named(folder: Path) -> None:
    worker = scripted(folder, TWO)
    async with door(folder, worker) as (router, client):
        for name, (change, field, message) in WRONG.items():
            made = await client.post(
                PAGE,
                content=json.dumps(body(**change)),
                headers={"content-type": "application/json"},
            )
            assert made.status_code == 400, (name, made.text)
            error = made.json()["error"]
            assert error["param"] == field, (name, error)
            assert message in error["message"], (name, error)
        async with openai_of(router) as sdk:
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(model="tiny", **body(tool_choice="any"))  # type: ignore[call-overload]
            assert caught.value.param == "tool_choice"
        plain = await client.post("/v1/completions", json={"prompt": "x", "tools": TOOLS})
        assert plain.json()["error"]["param"] == "tools"
        assert not router.service.queue_status().running
    assert not worker.legs


async def test_a_mode_that_is_not_known(folder: Path) -> None:
    message = router_pb2.GenerateRequest(max_tokens=3)
    message.chat.messages.add(role="user", content="x")
    message.chat.tool_choice.mode = 9  # type: ignore[assignment]
    async with door(folder) as (router, _):
        error = await failing(router.generate(message))
    assert isinstance(error, Rejected)
    assert error.field == "chat.tool_choice"
    assert "9 is unknown here" in error.message


async def test_parameters_of_our_own_client(folder: Path) -> None:
    async with door(folder) as (router, _), AsyncClient(router.address) as ours:
        with pytest.raises(Rejected, match="goes with messages"):
            await ours.complete(prompt="x", tools=TOOLS)
        for given, field in (
            ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
            ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
            ({"messages": [*TALK, RESULT]}, "messages[1].tool_call_id"),
            ({"messages": [*TALK, {"role": "assistant"}]}, "messages[1]"),
        ):
            with pytest.raises(Rejected) as caught:
                await ours.complete(**{"messages": TALK, **given})  # type: ignore[arg-type]
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("template", "wanted", "message"),
    [
        ("{{ messages[0].content }}", "hermes", "chat template takes no tools"),
        ("{{ messages[0].content }}{{ tools }}", "auto", "--tool-format"),
    ],
)
async def test_models_without_tools(folder: Path, template: str, wanted: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    async with door(folder, tool_format=wanted) as (_, client):
        made = await client.post(PAGE, json=body())
        assert made.status_code == 400
        assert made.json()["error"]["param"] == "tools"
        assert message in made.json()["error"]["message"]
        assert (await client.post(PAGE, json=body(tools=None))).status_code == 200
