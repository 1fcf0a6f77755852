"""A stand-in for an unmodified ``vllm serve``: its replies as vLLM 0.32 sends them, in chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from kvrelay.cluster.ports import free_ports

MODEL = "model"
VOCAB = 200


def next_token(tokens: Sequence[int]) -> int:
    """What the stand-in's model says: a function of all tokens before."""
    return (sum(tokens) * 31 + len(tokens)) % (VOCAB - 20) + 10


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """Its whole answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class StockServer:
    """``deaths``: after so many tokens of an answer a server closes its connection and its port.

    Servers may share it: each entry is of the one that serves the answer.
    ``details``: whether it tells its cache hits. ``reply``: a status and a body for every answer.
    """

    version: str = "0.32.0"
    model: str = MODEL
    details: bool = True
    deaths: list[int] = field(default_factory=list)
    reply: tuple[int, str] | None = None
    scale_out: bool = True
    hangs: bool = False
    bodies: list[dict[str, object]] = field(default_factory=list)
    open: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        await self.restart()

    async def restart(self) -> None:
        """Listen again on the same port."""
        port = int(self.url.rpartition(":")[2])
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].split()[0])
            body = await reader.readexactly(length)
            path = head.split()[1]
            if path.startswith("/inference") and not self.scale_out:
                _whole(writer, 403, '{"error": {"message": "Scale-out endpoints are disabled"}}')
            elif path == "/inference/v1/generate":
                await self._generate(json.loads(body), reader, writer)
            else:
                _whole(writer, 200, self._page(path))
        writer.close()

    def _page(self, path: str) -> str:
        entry = {"id": self.model, "root": "/models/one", "max_model_len": 1000}
        pages = {"/version": {"version": self.version}, "/v1/models": {"data": [entry]}}
        return json.dumps(pages[path]) if path in pages else ""

    async def _generate(
        self, body: dict[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.bodies.append(body)
        if self.reply is not None:
            _whole(writer, *self.reply)
            return
        self.open += 1
        left = asyncio.ensure_future(reader.read())
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            async for event in self._events(body):
                if left.done():
                    self.left.set()
                    return
                line = (
                    f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                )
                for part in (line[:7], line[7:]):  # an event may come in several chunks
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self.open -= 1
            left.cancel()

    async def _events(self, body: dict[str, object]) -> AsyncIterator[object]:
        tokens = list(body["token_ids"])  # type: ignore[call-overload]
        params = body["sampling_params"]
        assert isinstance(params, dict)
        count = params["max_tokens"]
        made = answer(tokens, count)
        for index, token in enumerate(made):
            if index in self.deaths:
                assert self._server is not None
                self.deaths.remove(index)
                self._server.close()
                return
            places = [
                {"token_id": token, "logprob": -0.5},
                {"token_id": 1, "logprob": -2.0},
                {"token_id": 2, "logprob": -0.7},
            ]
            logprobs = {"content": [{**places[0], "top_logprobs": places}]}
            choice = {
                "index": 0,
                "token_ids": [token],
                "finish_reason": "length" if index == count - 1 else None,
                "logprobs": None if params["logprobs"] is None else logprobs,
            }
            yield {"choices": [choice]}
            await asyncio.sleep(0.002)
            while self.hangs:
                await asyncio.sleep(0.01)
                yield {"choices": []}
        usage: dict[str, object] = {"prompt_tokens": len(tokens), "completion_tokens": count}
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
        yield {"choices": [], "usage": usage}
        yield "[DONE]"


def _whole(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    writer.write(f"HTTP/1.1 {status} Status\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


@asynccontextmanager
async def started(*servers: StockServer) -> AsyncIterator[tuple[str, ...]]:
    """The URLs of the servers, which are started."""
    for server in servers:
        await server.start()
    try:
        yield tuple(server.url for server in servers)
    finally:
        for server in servers:
            await server.stop()
