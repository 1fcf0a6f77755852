"""An OpenAI server without a model, as fast as asyncio allows: for what measures or tests a client.

Token ``i`` of an answer is a function of the prompt, the seed and ``i``. How a request is answered,
well or badly, is up to a function of the caller.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

VOCABULARY = 256
MODEL = "stub"


@dataclass(frozen=True, slots=True, kw_only=True)
class StubManners:
    """How one request is answered. ``delay``, ``gap``: seconds before the first token and others.

    ``cut_after``: close the connection after so many tokens; ``wrong_at``: a token that is another;
    ``usage_error``: tokens too many in the usage; ``short_by``: tokens that are not sent;
    ``cached``: tokens in the usage; ``error_after``: an error event after so many tokens.
    """

    status: int = 200
    delay: float = 0.0
    gap: float = 0.0
    cut_after: int | None = None
    error_after: int | None = None
    wrong_at: int | None = None
    usage_error: int = 0
    total_error: int = 0
    short_by: int = 0
    cached: int = 0
    token_ids: bool = True
    usage: bool = True
    drops: bool = False
    """Close the connection, without a word, when it brings a second request."""


GOOD = StubManners()
Behave = Callable[[int], StubManners]


class StubServer:
    """Counts requests and how many are open; ``behave`` gets the number of a request.

    With ``keeps`` it keeps all bodies and authorizations.
    """

    def __init__(self, behave: Behave, keeps: bool = False) -> None:
        self.url = ""
        self.requests = 0
        self.open = 0
        self.most_open = 0
        self.left = 0  # requests whose client closed the connection
        self.authorizations: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.behave = behave
        self._keeps = keeps

    def prompts(self) -> list[list[int]]:
        """The token ids of the kept bodies."""
        sent = (body["prompt"] for body in self.bodies)
        return [[int(one) for one in prompt] for prompt in sent if isinstance(prompt, list)]

    async def serve(self, started: Callable[[str], object]) -> None:
        """Serve until cancelled; ``started`` gets the URL."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
        port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        started(self.url)
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered = 0
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if answered and self.behave(self.requests).drops:
                    break
                answered += 1
                if head.startswith("GET"):
                    self._page(writer, head.split()[1])
                elif not await self._answer(writer, body, fields):
                    break
        writer.close()

    def _page(self, writer: asyncio.StreamWriter, path: str) -> None:
        found = path == "/v1/models"
        text = json.dumps({"data": [{"id": MODEL}]}).encode() if found else b"none"
        status = "200 OK" if found else "404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(text)))
        writer.write(text)

    async def _answer(
        self, writer: asyncio.StreamWriter, body: bytes, fields: dict[str, str]
    ) -> bool:
        """Whether the connection stays open."""
        number = self.requests
        manners = self.behave(number)
        self.requests += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        asked = json.loads(body)
        if self._keeps:
            self.authorizations.append(fields.get("authorization", ""))
            self.bodies.append(asked)
        try:
            return await self._stream(writer, asked, manners)
        except ConnectionError:
            self.left += 1
            raise
        finally:
            self.open -= 1

    async def _stream(
        self, writer: asyncio.StreamWriter, asked: dict[str, object], manners: StubManners
    ) -> bool:
        if manners.status != 200:
            text = json.dumps({"error": {"message": "the stub refuses"}}).encode()
            writer.write(
                b"HTTP/1.1 %d X\r\nretry-after: 2\r\ncontent-length: %d\r\n\r\n%b"
                % (manners.status, len(text), text)
            )
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.sleep(manners.delay)
        tokens = list(stub_tokens(asked, manners))
        for at, token in enumerate(tokens):
            if at == manners.cut_after:
                return False
            if at == manners.error_after:
                await _event(writer, {"error": {"message": "the stub broke"}})
                return False
            if at and manners.gap:
                await asyncio.sleep(manners.gap)
            last = at + 1 == len(tokens)
            await _event(writer, _chunk(asked, token, "length" if last else None, manners))
        if manners.usage:
            await _event(writer, {"choices": [], "usage": _usage(asked, tokens, manners)})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True


def stub_tokens(asked: dict[str, object], manners: StubManners = GOOD) -> Iterator[int]:
    """The tokens of an answer."""
    prompt = json.dumps([asked.get("prompt"), asked.get("messages"), asked.get("seed")])
    start = zlib.crc32(prompt.encode())
    count = int(str(asked["max_tokens"])) - manners.short_by
    for at in range(count):
        wrong = 1 if at == manners.wrong_at else 0
        yield (start + at * at + wrong) % VOCABULARY


def _chunk(
    asked: dict[str, object], token: int, finish: str | None, manners: StubManners
) -> dict[str, object]:
    text = f"t{token} "
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if "messages" in asked else {"text": text}
    if manners.token_ids and asked.get("return_token_ids"):
        choice["token_ids"] = [token]
    return {"choices": [choice], "usage": None}


def _usage(asked: dict[str, object], tokens: list[int], manners: StubManners) -> dict[str, object]:
    prompt = asked.get("prompt")
    count = len(prompt) if isinstance(prompt, list) else 7
    completion = len(tokens) + manners.usage_error
    return {
        "prompt_tokens": count,
        "completion_tokens": completion,
        "total_tokens": count + completion + manners.total_error,
        "prompt_tokens_details": {"cached_tokens": manners.cached},
    }


async def _event(writer: asyncio.StreamWriter, value: object) -> None:
    data = b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


@contextmanager
def stub(behave: Behave = lambda number: GOOD) -> Iterator[StubServer]:
    """A stub in a thread of this process, so that its counts can be read."""
    server, started = StubServer(behave, keeps=True), threading.Event()
    loop = asyncio.new_event_loop()

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)
        loop.close()

    serving = loop.create_task(server.serve(lambda url: started.set()))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(20)


@contextmanager
def stub_process(gap: float = 0.0) -> Iterator[str]:
    """The URL of a stub in a process of its own."""
    context = multiprocessing.get_context("spawn")
    urls: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_child, args=(urls, gap), daemon=True)
    child.start()
    try:
        yield urls.get()
    finally:
        child.terminate()
        child.join(10)


def _child(urls: multiprocessing.SimpleQueue[str], gap: float) -> None:
    manners = StubManners(gap=gap)
    asyncio.run(StubServer(lambda number: manners).serve(urls.put))
