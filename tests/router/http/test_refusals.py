"""What a client sends that few clients send: it is served, or an error says what to change."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from inspect import signature

import pytest
from openai import BadRequestError
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from kvrelay.cluster.layout import ROOT
from kvrelay.errors import Rejected
from router.http.ask import read_ask
from tests.router.fakes import Running, decode_worker
from tests.router.http.rig import SEED, door, expected, openai_of
from tests.router.rig import PROMPT

GOOD: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED}
TALK: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("chat", "change"),
    [
        (False, {"logprob_token_ids": [5], "logprobs": 1}),
        (False, {"repetition_detection": {"max_pattern_size": 3}}),
        (False, {"thinking_token_budget": 5}),
        (False, {"watermarking": True}),
        (True, {"echo": True}),
        (True, {"return_prompt_text": True}),
        (True, {"mm_processor_kwargs": {"num_crops": 4}}),
        (True, {"media_io_kwargs": {"video": {"num_frames": 1}}}),
    ],
)
async def test_fields_of_vllm_that_would_change_the_answer_are_refused(
    chat: bool, change: dict[str, object]
) -> None:
    page = "/v1/chat/completions" if chat else "/v1/completions"
    async with door() as (_, client):
        made = await client.post(page, json={**(TALK if chat else GOOD), **change})
        assert made.status_code == 400, made.text
        assert made.json()["error"]["param"] == next(iter(change))


async def test_fields_of_vllm_that_change_nothing_are_accepted() -> None:
    """As a client sends them that writes all fields of vLLM's classes."""
    neutral = {
        "logprob_token_ids": [],
        "thinking_token_budget": -1,
        "watermarking": False,
        "repetition_detection": None,
        "structured_outputs": None,
    }
    async with door(strict_fields=True) as (_, client):
        made = await client.post("/v1/completions", json={**GOOD, **neutral})
        assert made.json()["choices"][0]["text"] == expected(3)


def documented(page: str) -> set[str]:
    """The names in the first column of the tables of fields, and their neighbours."""
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / page).read_text("utf-8"), re.M)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    return names - {"auto", "required", "none"}


FIELDS: dict[str, object] = {
    "prompt": "x",
    "n": 2,
    "max_tokens": 3,
    "seed": 3,
    "stop": ["zz"],
    "stop_token_ids": [5],
    "cache_salt": "mine",
    "priority": 1,
    "retention": "tool_call",
    "echo": True,
    "return_token_ids": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "bad_words": ["no"],
    "structured_outputs": {"regex": "[ab]+"},
    "stream": True,
    "stream_options": {
        "include_usage": True,
        "continuous_usage_stats": True,
        "include_obfuscation": False,
    },
}
OF_CHATS: dict[str, object] = {
    "messages": [{"role": "user", "content": "Hi", "name": "me"}],
    "max_completion_tokens": 3,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "none",
    "include_reasoning": False,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 1,
}


@pytest.mark.parametrize("chat", [False, True])
def test_fields_of_the_page_are_known_to_a_strict_server(chat: bool) -> None:
    own = {"prompt", "echo"}
    body = {**FIELDS, **OF_CHATS, "logprobs": True} if chat else FIELDS
    assert documented("http.md") <= FIELDS.keys() | OF_CHATS.keys()
    given = {name: value for name, value in body.items() if not chat or name not in own}
    ask = read_ask(given, chat, "r", strict=True)
    assert ask.cache_salt == "mine"
    assert ask.form.continuous


@pytest.mark.parametrize("chat", [False, True])
def test_a_strict_server_knows_every_parameter_of_the_openai_client(chat: bool) -> None:
    """Known, whether it is served or refused by what it would change."""
    create = ChatCompletions.create if chat else Completions.create
    names = {name for name in signature(create).parameters if not name.startswith("extra_")}
    for name in names - {"self", "timeout"}:
        base = {"messages": OF_CHATS["messages"]} if chat else {"prompt": "x"}
        assert "no such field" not in refusal({**base, name: ["what no field has"]}, chat), name


def refusal(body: dict[str, object], chat: bool) -> str:
    """Why a strict server refuses a body; empty if it takes it."""
    try:
        read_ask(body, chat, "r", strict=True)
    except Rejected as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("messages[0].prefix", {"messages": [{"role": "user", "content": "Hi", "prefix": True}]}),
        (
            "messages[0].content[0].cache_control",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "Hi", "cache_control": {}}],
                    }
                ]
            },
        ),
        ("tools[0].function.safe", {"tools": [{"function": {"name": "f", "safe": True}}]}),
        ("response_format.schema", {"response_format": {"type": "json_object", "schema": {}}}),
        (
            "stream_options.include_usages",
            {"stream": True, "stream_options": {"include_usage": True, "include_usages": True}},
        ),
    ],
)
def test_unknown_fields_of_nested_objects_have_their_names(
    field: str, change: dict[str, object]
) -> None:
    body = {"messages": OF_CHATS["messages"], **change}
    read_ask(body, True, "r", strict=False)
    with pytest.raises(Rejected, match="no such field") as caught:
        read_ask(body, True, "r", strict=True)
    assert caught.value.field == field


def test_an_answer_that_is_all_reasoning_may_be_sent_back() -> None:
    """Its content is null: it was cut before the end of the reasoning."""
    said = {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hm"}
    turns = [{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "So?"}]
    ask = read_ask({"messages": turns}, True, "r", strict=True)
    made = ask.messages[0].chat.messages[1]
    assert (made.content, made.reasoning) == ("", "Hm")


def test_no_choices_are_refused_with_their_value() -> None:
    body: dict[str, object] = {"prompt": "x", "structured_outputs": {"choice": []}}
    assert "got {'choice': []}" in refusal(body, False)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_fallback": True}, "structured_outputs.disable_fallback"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag"),
        ({"regex": 5, "json": None, "disable_fallback": False}, "structured_outputs"),
    ],
)
async def test_options_of_structured_output_that_are_not_served_are_named(
    wanted: dict[str, object], field: str
) -> None:
    async with door() as (_, client):
        made = await client.post("/v1/completions", json={**GOOD, "structured_outputs": wanted})
        assert (made.status_code, made.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, 5000])
async def test_a_limit_has_the_name_it_was_sent_by(limit: str, value: int) -> None:
    """``max_completion_tokens`` is what OpenAI's clients send for chats."""
    async with door() as (router, client):
        body = {"messages": TALK["messages"], limit: value}
        made = await client.post("/v1/chat/completions", json=body)
        error = made.json()["error"]
        assert (made.status_code, error["param"]) == (400, limit)
        assert error["message"].startswith(f"{limit}: ")
        async with openai_of(router) as sdk:
            with pytest.raises(BadRequestError) as caught:
                await sdk.chat.completions.create(model="", **body)  # type: ignore[call-overload]
            assert caught.value.param == limit


@pytest.mark.parametrize("priority", [9, -9, 2**31])
async def test_an_error_about_the_priority_has_the_value_that_was_sent(priority: int) -> None:
    async with door() as (_, client):
        made = await client.post("/v1/completions", json={**GOOD, "priority": priority})
        assert made.json()["error"]["message"].endswith(f"from -8 to 8, got {priority}")
        for good in (8, -8):
            made = await client.post("/v1/completions", json={**GOOD, "priority": good})
            assert made.status_code == 200


async def test_an_empty_salt_separates_nothing_and_is_refused() -> None:
    """As in vLLM: a client that lost its salt would share blocks with everyone."""
    async with door() as (_, client):
        made = await client.post("/v1/completions", json={**GOOD, "cache_salt": ""})
        assert (made.status_code, made.json()["error"]["param"]) == (400, "cache_salt")


async def test_an_encoded_body_is_refused_by_its_encoding() -> None:
    body = json.dumps(GOOD).encode()
    async with door() as (_, client):
        for encoding in ("gzip", "br"):
            made = await client.post(
                "/v1/completions",
                content=gzip.compress(body),
                headers={**JSON, "content-encoding": encoding},
            )
            assert made.status_code == 415
            assert f"content-encoding: '{encoding}'" in made.json()["error"]["message"]
        made = await client.post(
            "/v1/completions", content=body, headers={**JSON, "content-encoding": "Identity"}
        )
        assert made.json()["choices"][0]["text"] == expected(3)


async def test_a_method_that_a_page_does_not_have() -> None:
    async with door() as (_, client):
        made = await client.get("/v1/completions")
        assert (made.status_code, made.headers["allow"]) == (405, "POST")
        error = made.json()["error"]
        assert error["code"] == "method_not_supported"
        assert error["message"] == "GET '/v1/completions': use POST"
        error = (await client.post("/completions")).json()["error"]
        assert error["code"] == "not_found"
        assert error["message"].startswith("no page '/completions': there are /v1/chat/completions")


@pytest.mark.parametrize(
    "trace",
    [
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ],
)
async def test_a_trace_that_is_none_gives_no_request_its_id(trace: str) -> None:
    """By W3C's rules a server ignores it; requests of several clients would share one id."""
    async with door() as (_, client):
        made = await client.post("/v1/completions", json=GOOD, headers={"traceparent": trace})
        assert made.status_code == 200
        assert made.headers["x-request-id"] != trace.split("-")[1]
        assert "traceparent" not in made.headers


async def _sent(router: Running, *parts: bytes) -> bytes:
    """All that the door answers; the connection ends by itself."""
    host, port = router.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("cut", [False, True])
async def test_a_wish_for_http2_leaves_the_request_as_it_is(cut: bool) -> None:
    """Java's own client sends these headers with the first request of each connection."""
    body = json.dumps(GOOD).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings%s\r\n"
        b"Content-Length: %d\r\nHost: x\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
        b"Upgrade: h2c\r\nContent-Type: application/json\r\nX-Request-ID: one\r\n\r\n"
    )
    first, last = head % (b"", len(body)), head % (b", close", len(body))
    pieces = (
        [first[:70], first[70:], body[:9], body[9:], last, body]
        if cut
        else [first + body + last + body]
    )
    async with door([decode_worker()]) as (router, _):
        answers = (await _sent(router, *pieces)).split(b"HTTP/1.1 ")[1:]
    assert len(answers) == 2
    for answer in answers:
        assert answer.startswith(b"200 OK\r\n")
        assert b"x-request-id: one" in answer
        made = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert made["choices"][0]["text"] == expected(3)
    async with door() as (router, _):
        gone = await _sent(router, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert gone.startswith(b"HTTP/1.1 400 ")
