"""An OpenAI server with a prefix cache and no model, exact but for one defect that a test chooses.

A token is a function of all tokens before it, and of the seed unless it is greedy.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BLOCK = 16
CAPACITY = 6000  # tokens of the cache
VOCABULARY = 256
PAUSE = 0.001  # seconds of a step


@dataclass(frozen=True, kw_only=True)
class FakeManners:
    """``defect``: what is wrong. ``lacks``: fields that are refused, or not acted upon."""

    defect: str = ""
    lacks: frozenset[str] = frozenset()
    restarts: Path | None = None
    """A line for each restart."""
    replicas: int = 1
    """Each has a cache of its own; they are asked in turn."""
    silent: str = ""
    """Whose tokens have no text: "all", "some" prompts, prompts in a "crowd"; "empty" has none."""


@dataclass
class FakeLM:
    """Requests that are open, what is cached, and what has happened."""

    manners: FakeManners
    open: dict[int, int] = field(default_factory=dict)  # prompt lengths
    cache: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # oldest first
    evicted: set[tuple[int, ...]] = field(default_factory=set)
    aborted: set[tuple[int, ...]] = field(default_factory=set)
    asked: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has(self, name: str) -> bool:
        return name not in self.manners.lacks

    def restarted(self) -> int:
        path = self.manners.restarts
        return len(path.read_text().splitlines()) if path is not None and path.exists() else 0

    def cached(self, salt: str, prompt: tuple[int, ...]) -> int:
        """Tokens of whole blocks that are known, without the last token of the prompt."""
        found = 0
        for index, (owner, known) in enumerate(self.cache):
            if owner == salt or self.manners.defect == "salts":
                pairs = zip(known, prompt[:-1], strict=False)
                shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                shared = min(len(known), len(prompt) - 1) if shared is None else shared
                if shared // BLOCK * BLOCK > found:
                    found = shared // BLOCK * BLOCK
                    self.cache.append(self.cache.pop(index))
        return found

    def keep(self, salt: str, tokens: tuple[int, ...]) -> None:
        self.cache.append((salt, tokens))
        while sum(len(known) for _, known in self.cache) > CAPACITY:
            _, known = self.cache.pop(0)
            self.evicted.add(known[:BLOCK])

    def wrong(self, own: int, prompt: tuple[int, ...], cached: int, choice: int) -> bool:
        """Whether the defect shows in this step."""
        others = [size for number, size in self.open.items() if number != own]
        match self.manners.defect:
            case "batched":
                return bool(others)
            case "short":
                return any(size <= 8 for size in others)
            case "long":
                return any(size >= 512 for size in others)
            case "hit":
                return cached > 0
            case "part of a hit":
                return 0 < cached < (len(prompt) - 1) // BLOCK * BLOCK
            case "recomputed":
                return cached == 0 and prompt[:BLOCK] in self.evicted
            case "abort":
                return prompt in self.aborted
            case "samples":
                return choice > 0 and random.random() < 0.5
            case "restart":
                return self.restarted() > 0
        return False

    def silent(self, own: int, prompt: tuple[int, ...]) -> bool:
        """Whether all tokens of this answer are without text, as special tokens are."""
        match self.manners.silent:
            case "all":
                return True
            case "some":
                return zlib.crc32(bytes(prompt)) % 2 == 0
            case "crowd":
                return len(self.open) > 1
        return False

    def token(self, context: list[int], body: dict[str, Any], choice: int, prompt: int) -> int:
        sampled = float(body.get("temperature") or 0) > 0
        key: list[object] = [context]
        if sampled:
            seed = int(body.get("seed") or 0) if self.has("other seeds") else 1
            key += [seed + choice, len(context)]
        if sampled and self.manners.defect == "seed":
            key.append(random.random())
        if self.manners.defect == "resume":
            key.append(prompt)
        if self.manners.defect == "late resumes" and sampled and int(body["max_tokens"]) < 8:
            key.append(prompt)
        if sampled and not self.has("draws that go on"):
            key.append(prompt)
        return zlib.crc32(json.dumps(key).encode()) % VOCABULARY


async def stream(lm: FakeLM, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
    own = lm.asked
    lm.asked += 1
    prompt = _prompt(body)
    count, most = int(body.get("n") or 1), int(body["max_tokens"])
    if not lm.has("samples"):
        count = 1
    if lm.manners.silent == "empty":
        most = 0
    salt = f"{own % lm.manners.replicas}:{body.get('cache_salt') or ''}"
    lm.open[own] = len(prompt)
    done = False
    try:
        if "concurrency" in lm.manners.lacks:
            await lm.turn.acquire()
        await asyncio.sleep(PAUSE * (1 + len(prompt) // 128))
        cached = lm.cached(salt, prompt)
        lm.keep(salt, prompt)
        answers: list[list[int]] = [[] for _ in range(count)]
        silent = lm.silent(own, prompt)
        for at in range(most):
            await asyncio.sleep(PAUSE)
            for choice, made in enumerate(answers):
                token = lm.token([*prompt, *made], body, choice, len(prompt))
                if at == 3 and lm.wrong(own, prompt, cached, choice):
                    token = (token + 1) % VOCABULARY
                made.append(token)
                ended = "length" if at + 1 == most else None
                said = "" if silent else f"<{token}>"
                made_choice = _choice(lm, body, chat, choice, token, said)
                yield _event({"choices": [made_choice | {"finish_reason": ended}]})
        if not most:
            ends = [_choice(lm, body, chat, at, None, "") for at in range(count)]
            yield _event({"choices": [end | {"finish_reason": "stop"} for end in ends]})
        lm.keep(salt, (*prompt, *answers[0]))
        done = True
        if lm.has("usage"):
            usage = _usage(lm, len(prompt), count * most, cached)
            yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
    finally:
        del lm.open[own]
        if not done:
            lm.aborted.add(prompt)
        if lm.turn.locked():
            lm.turn.release()


def _prompt(body: dict[str, Any]) -> tuple[int, ...]:
    given = body.get("prompt") or body["messages"][-1]["content"]
    return tuple(given if isinstance(given, list) else given.encode())


def _choice(
    lm: FakeLM, body: dict[str, Any], chat: bool, index: int, token: int | None, text: str
) -> dict[str, object]:
    """A choice of an event; the last one of an empty answer has no token."""
    made: dict[str, object] = {"index": index}
    made |= {"delta": {"content": text}} if chat else {"text": text}
    if body.get("return_token_ids") and lm.has("return_token_ids"):
        made["token_ids"] = [] if token is None else [token]
    if token is not None and body.get("logprobs") and lm.has("logprobs"):
        gap = 0.25 if lm.manners.defect == "logprobs" and len(lm.open) > 1 else 0.0
        chance = -math.log(2 + token) - gap
        made["logprobs"] = (
            {"content": [{"token": text, "logprob": chance}]}
            if chat
            else {"tokens": [text], "token_logprobs": [chance]}
        )
    return made


def _usage(lm: FakeLM, prompt: int, completion: int, cached: int) -> dict[str, object]:
    wrong = lm.manners.defect == "usage" and prompt > 100
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion + wrong,
        "total_tokens": prompt + completion + wrong,
    }
    if lm.has("cached"):
        more = BLOCK if cached and lm.manners.defect == "cached" else 0
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached + more, prompt)}
    return usage


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def app(lm: FakeLM) -> Starlette:
    async def ask(request: Request) -> Response:
        body = await request.json()
        chat = request.url.path.startswith("/v1/chat")
        refused = [name for name in lm.manners.lacks if body.get(name) is not None]
        if isinstance(body.get("prompt"), list) and not lm.has("ids"):
            refused.append("ids")
        if not chat and not lm.has("completions"):
            return JSONResponse({"error": {"message": "no completions here"}}, 404)
        if isinstance(body.get("cache_salt"), int) and lm.has("salt"):
            refused.append("cache_salt")
        if refused or lm.manners.defect == "broken":
            return JSONResponse({"error": {"message": f"refused: {refused}"}}, 400)
        if not lm.has("salt"):
            body.pop("cache_salt", None)
        return StreamingResponse(stream(lm, body, chat), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "owned_by": "tests"}]})

    posts = [
        Route(f"/v1/{path}", ask, methods=["POST"]) for path in ("completions", "chat/completions")
    ]
    return Starlette(routes=[*posts, Route("/v1/models", models)])


@contextmanager
def fake(manners: FakeManners) -> Iterator[str]:
    """The URL of a server in a thread of this process."""
    config = uvicorn.Config(app(FakeLM(manners)), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        with suppress(RuntimeError):
            thread.join(20)
