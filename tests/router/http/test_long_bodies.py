"""A long body holds up no other request, and lists with too many entries are refused early."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping

import pytest

from kvrelay.rpc.security.identity import Tenant
from router.generate.request import MAX_MESSAGES
from router.http import exchange
from router.http.exchange import LONG_BODY
from router.http.fields import parse_object
from router.queue.inbox import Sender
from tests.router.http.rig import SEED, bounded, door, events, raw
from tests.router.rig import PROMPT, until

CHATS, PAGE = "/v1/chat/completions", "/v1/completions"
LOCAL = Sender(Tenant(), "127.0.0.1").holder
TALK: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
TOO_MANY: dict[str, tuple[object, str]] = {
    "messages": ([5] * (MAX_MESSAGES + 1), "at most 4096"),
    "tools": ([5] * 129, "at most 128, got 129: offer fewer"),
    "logit_bias": ({f"x{name}": 1 for name in range(1025)}, "at most 1024 tokens, got 1025"),
    "bad_words": ([5] * 129, "at most 128, got 129"),
    "stop": ([5] * 17, "at most 16, got 17"),
    "stop_token_ids": ([-1] * 129, "at most 128 ids, got 129"),
}


@pytest.mark.parametrize("name", TOO_MANY)
async def test_what_is_too_long_is_not_looked_at(name: str) -> None:
    """The first of the entries is wrong, and the error is the one of their number."""
    value, told = TOO_MANY[name]
    async with door() as (_, client):
        made = await client.post(CHATS, json={**TALK, name: value})
        assert made.status_code == 400
        error = made.json()["error"]
        assert (error["param"], error["message"]) == (name, f"{name}: {told}")


async def test_a_client_that_leaves_while_its_body_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes count until the thread has ended."""
    begun, go = threading.Event(), threading.Event()

    def parse(raw: bytes) -> Mapping[str, object]:
        begun.set()
        assert go.wait(20)
        return parse_object(raw)

    monkeypatch.setattr(exchange, "parse_object", parse)
    body = json.dumps({"prompt": PROMPT, "user": "x" * LONG_BODY})
    async with bounded() as (router, client, server):
        parsed = router.service.bodies.semaphore
        _, writer = await raw(client)
        writer.write(
            f"POST {PAGE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert await asyncio.to_thread(begun.wait, 20)
        writer.transport.abort()
        await until(lambda: server.connections.open == 0)
        assert parsed.held(LOCAL) >= len(body)
        go.set()
        await until(lambda: parsed.held(LOCAL) == 0)


@pytest.mark.parametrize(
    ("page", "body", "status"),
    [
        (PAGE, {"prompt": PROMPT, "max_tokens": 1}, 200),
        (PAGE, {"prompt": [1, "x"]}, 400),
        (CHATS, {**TALK, "max_tokens": 1}, 200),
        ("/tokenize", {"prompt": "x"}, 200),
        ("/detokenize", {"tokens": PROMPT}, 200),
    ],
)
async def test_a_stream_goes_on_while_a_long_body_is_read(
    page: str, body: dict[str, object], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, others = threading.Event(), threading.Event()

    def parse(raw: bytes) -> Mapping[str, object]:
        if len(raw) > LONG_BODY:
            begun.set()
            assert others.wait(20), "the other requests waited for this one"
        return parse_object(raw)

    monkeypatch.setattr(exchange, "parse_object", parse)
    async with door() as (_, client):
        padded = {**body, "user": "x" * LONG_BODY}
        long = asyncio.ensure_future(client.post(page, json=padded))
        assert await asyncio.to_thread(begun.wait, 20)
        asked = {"prompt": PROMPT, "max_tokens": 4, "seed": SEED, "stream": True}
        assert (await events(client, asked))[-1][1] == "[DONE]"
        others.set()
        assert (await long).status_code == status
