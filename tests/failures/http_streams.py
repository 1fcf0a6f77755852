"""Streams over HTTP of a client that always resumes, with the id of the last event it received."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx2

from tests.failures.streams import PATIENCE, REFUSAL, RETRY_SECONDS, Query

BROKEN = (429, 503)


class _Broken(Exception):
    """The stream ended before it was complete; the client may resume it."""


@dataclass(slots=True)
class HttpStream:
    """As ``streams.Stream``, through the HTTP door."""

    query: Query
    tokens: list[int] = field(default_factory=list)
    usage: dict[str, object] | None = None
    broken: int = 0
    refused: int = 0
    unbegun: int = 0
    told: bool = False
    _last: str = ""

    async def run(self, client: httpx2.AsyncClient) -> None:
        """Read to the end; resume whatever breaks."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                await self._read(client)
                return
            except (_Broken, httpx2.TransportError) as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{self.query} did not end: {error!r}") from error
                self.refused += REFUSAL in str(error)
            self.broken += 1
            self.unbegun += not self._last
            self.told = "h" in self._last.partition("-")[0]
            await asyncio.sleep(RETRY_SECONDS)

    async def _read(self, client: httpx2.AsyncClient) -> None:
        query = self.query
        body: dict[str, object] = {
            "prompt": query.prompt,
            "max_tokens": query.max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if query.seed is not None:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": query.seed}
        headers = {"last-event-id": self._last} if self._last else {}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode()
                if response.status_code in BROKEN or REFUSAL in said:
                    raise _Broken(said)
                raise AssertionError((response.status_code, said))
            known = self._last
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    known = value
                elif name == "data" and value == "[DONE]":
                    return
                elif name == "data":
                    self._take(json.loads(value))
                    self._last = known
        raise _Broken("the stream ended without its last event")

    def _take(self, chunk: dict[str, object]) -> None:
        match chunk:
            case {"error": {"message": str(message), "type": "server_error" | "rate_limit_error"}}:
                raise _Broken(message)
            case {"choices": [{"token_ids": list(tokens)}]}:
                self.tokens += tokens
            case {"choices": [], "usage": dict(usage)}:
                self.usage = usage
            case _:
                raise AssertionError(f"{self.query}: {chunk}")

    def check_usage(self) -> None:
        """The figures of an undisturbed run, whatever died."""
        usage = self.usage
        assert usage is not None
        assert usage["prompt_tokens"] == len(self.query.prompt), usage
        assert usage["completion_tokens"] == self.query.max_tokens, usage
        if not self.unbegun:
            found = usage["prompt_tokens_details"]
            assert found == {"cached_tokens": 0} or (found is None and not self.told), usage
