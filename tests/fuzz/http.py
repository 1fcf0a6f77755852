"""Requests of the HTTP door: mutated bodies of every page, broken heads, raw bytes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from router.http.resume import with_checksum
from tests.fuzz.mutate import FLOATS, TEXTS, WHOLE, Mutator
from tests.fuzz.ports import CALL_SECONDS, CONNECT_SECONDS, connect
from tests.fuzz.wire import http1, noise
from tests.secured import ADMIN, ALICE, BOB, SERVICE

PROMPT = list(range(7, 47))
SEEDS: Sequence[tuple[str, dict[str, object]]] = (
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": [PROMPT, "Once"], "n": 2, "max_tokens": 2, "stream": True}),
    (
        "/v1/completions",
        {
            "prompt": "Once upon",
            "max_tokens": 3,
            "echo": True,
            "stop": ["zz"],
            "logit_bias": {"5": 1.5},
            "bad_words": ["x"],
            "return_token_ids": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "You."},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            ],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "chat_template_kwargs": {"thinking": [True]},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "priority": 1,
            "retention": "tool_call",
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {}}}},
            },
            "tools": [],
            "tool_choice": "auto",
        },
    ),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}),
    ("/tokenize", {"prompt": "Once upon", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/detokenize", {"tokens": PROMPT}),
)
PAGES = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/llama", "/nothing")
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW")
_CONTENTS = ("", "0", "1e.2-AA", "9" * 5000, "3-" + "A" * 64, "..", "1.2.3-CwAAAAAAAAA")
IDS = (*_CONTENTS, *map(with_checksum, _CONTENTS))
UNKNOWN = (
    "x",
    "output_token_ids",
    "",
    "__class__",
    "best_of",
    "prompt_logprobs",
    "suffix",
    "tools",
    "guided_json",
)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


class HttpBytes:
    """Draws from ``chance`` alone, so that a seed repeats it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._mutator = Mutator(chance)

    def connection(self) -> bytes:
        """What one connection sends."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.1:
            return (noise if chance.random() < 0.5 else http1)(chance)
        if kind < 0.2:
            method, page = chance.choice(METHODS), chance.choice(PAGES)
            raw = self._head(method, page, 0) * chance.choice((1, 1, 1, 30))
            return self._mutator.damaged(raw) if chance.random() < 0.3 else raw
        raw = b"".join(self._post() for _ in range(chance.choice((1, 1, 1, 3))))
        return self._mutator.damaged(raw) if chance.random() < 0.2 else raw

    def _post(self) -> bytes:
        chance = self._chance
        page, seed = chance.choice(SEEDS)
        value: object = json.loads(json.dumps(seed))
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            value = self._changed(value, 4)
        body = self._text(value).encode("utf-8", "surrogatepass")
        if chance.random() < 0.25:
            body = self._mutator.damaged(body)
        if chance.random() < 0.1:
            return self._chunked(page, body)
        length = (
            len(body) if chance.random() < 0.9 else chance.choice((0, 1, 2 * len(body), 1 << 40))
        )
        return self._head("POST", page, length) + body

    def _text(self, value: object) -> str:
        """JSON; now and then with a name twice."""
        text = json.dumps(value)
        if self._chance.random() < 0.1 and text.startswith("{") and len(text) > 2:
            return f'{text[:-1]}, "max_tokens": {json.dumps(self._value())}}}'
        return text

    def _changed(self, value: object, depth: int) -> object:
        """One place of the value is another now."""
        chance = self._chance
        if depth == 0 or not isinstance(value, dict | list) or chance.random() < 0.15:
            return self._value()
        if isinstance(value, list):
            if value and chance.random() < 0.7:
                at = chance.randrange(len(value))
                value[at] = self._changed(value[at], depth - 1)
                return value
            return [*value, *[self._value()] * chance.choice((1, 2, 300))]
        if value and chance.random() < 0.75:
            name = chance.choice(list(value))
            if chance.random() < 0.15:
                del value[name]
            else:
                value[name] = self._changed(value[name], depth - 1)
        else:
            value[chance.choice(UNKNOWN)] = self._value()
        return value

    def _value(self) -> object:
        chance = self._chance
        match chance.randrange(8):
            case 0:
                return chance.choice(WHOLE) * chance.choice((1, -1))
            case 1:
                return chance.choice(FLOATS)
            case 2:
                return chance.choice((*TEXTS, "\ud800", "5", "null"))
            case 3:
                return chance.choice((None, True, False))
            case 4:
                return [chance.randrange(300) for _ in range(chance.choice((0, 1, 50, 3000)))]
            case 5:
                deep: object = 1
                for _ in range(chance.choice((3, 90, 900))):
                    deep = [deep] if chance.random() < 0.5 else {"a": deep}
                return deep
            case 6:
                return {"type": chance.choice(("text", "object", "x")), "text": "y", "a": None}
        return ["a", 1, None, {"role": "user"}]

    def _chunked(self, page: str, body: bytes) -> bytes:
        chance = self._chance
        head = self._head("POST", page, None)
        size = chance.choice((1, 7, 4096))
        parts = [body[at : at + size] for at in range(0, min(len(body), 200 * size), size)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return (
            head + chunks + chance.choice((b"0\r\n\r\n", b"", b"zz\r\n", b"-1\r\n\r\n", b"0\r\n"))
        )

    def _head(self, method: str, page: str, length: int | None) -> bytes:
        chance = self._chance
        kinds = ("application/json", "application/json; charset=utf-8", "text/plain", "")
        fields = [
            ("host", "fuzz"),
            ("content-type", kinds[0] if chance.random() < 0.95 else chance.choice(kinds)),
            ("transfer-encoding", "chunked") if length is None else ("content-length", str(length)),
        ]
        if chance.random() < 0.9:
            token = chance.choice((ALICE, ALICE, ALICE, BOB, SERVICE, ADMIN, "wrong"))
            fields.append(("authorization", f"Bearer {token}"))
        if chance.random() < 0.1:
            fields.append(("last-event-id", chance.choice(IDS)))
        if chance.random() < 0.1:
            fields.append(("x-request-id", chance.choice(("a", "b" * 200, "\x7f", ""))))
        if chance.random() < 0.1:
            fields.append((chance.choice(("expect", "upgrade", "connection")), "100-continue"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{method} {page} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


@dataclass(slots=True)
class HttpPort:
    """The door; an answer with status 500 is a bug."""

    name: str
    address: str
    bytes_of: HttpBytes
    turns: int = 1
    tls: ssl.SSLContext | None = None
    ended: Counter[str] = field(default_factory=Counter)

    async def send(self) -> None:
        try:
            reader, writer = await connect(self.address, self.tls)
        except (OSError, TimeoutError):
            self.ended["refused"] += 1
            return
        sent = self.bytes_of.connection()
        try:
            writer.write(sent)
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), CALL_SECONDS)
            self._count(sent, await _answer(reader))
        except OSError:
            self.ended["cut"] += 1
        finally:
            writer.transport.abort()

    def _count(self, sent: bytes, got: bytes) -> None:
        statuses = _STATUS.findall(got)
        self.ended[statuses[0].decode() if statuses else "silent or closed"] += 1
        if b"500" in statuses:
            self.ended[f"500 of {sent[:3000]!r}: {got[-300:]!r}"] += 1


async def _answer(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(1 << 16), CALL_SECONDS)
    except TimeoutError:
        return b""


async def is_served(address: str, tls: ssl.SSLContext | None) -> bool:
    """Whether the door answers a good request."""
    reader, writer = await connect(address, tls)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BOB}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        got = await asyncio.wait_for(reader.readline(), 6 * CONNECT_SECONDS)
    finally:
        writer.transport.abort()
    return b" 200 " in got
