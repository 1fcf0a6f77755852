"""The door of an OpenAI server: ``/v1/completions`` and ``/v1/chat/completions``, streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError, Rejected, Unavailable
from kvrelay.load.http_connection import HttpConnections, HttpOrigin, HttpResponse
from kvrelay.load.request import AnswerPiece, LoadRequest, ServerAccount

Json: TypeAlias = "dict[str, object]"
DONE = b"[DONE]"
EVENT_BYTES = 32 << 20
RETRY_SECONDS = 1.0
REFUSED = (429, 503)
TIMED_OUT = (408, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorOptions:
    """``plain``: only fields of OpenAI's own API.

    ``tokens``: the bearer token of each tenant, of "" for those that have none.
    """

    model: str = ""
    temperature: float = 0.0
    chat: bool = False
    plain: bool = False
    ignore_eos: bool = True
    tokens: Mapping[str, str] = field(default_factory=dict)


class HttpDoor:
    """One server. Connections are kept and used again."""

    def __init__(self, url: str, options: DoorOptions, field: str = "url") -> None:
        origin = HttpOrigin.parse(field, url.rstrip("/").removesuffix("/v1"))
        self._connections = HttpConnections(origin)
        self._options = options

    async def ask(self, request: LoadRequest, timeout: float) -> AsyncGenerator[AnswerPiece, None]:  # noqa: ASYNC109 - the caller has the clock
        path = "/v1/chat/completions" if self._options.chat else "/v1/completions"
        body = json.dumps(self._body(request), separators=(",", ":")).encode()
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        tokens = self._options.tokens
        if token := tokens.get(request.tenant) or tokens.get(""):
            headers["authorization"] = f"Bearer {token}"
        async with self._connections.request("POST", path, headers, body) as response:
            if response.status != 200:
                raise _refusal(response, await response.text())
            buffer = b""
            ended = False
            async for at, data in response.body():
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                if len(buffer) > EVENT_BYTES:
                    raise Unavailable(f"the server sent an event of over {EVENT_BYTES >> 20} MiB")
                for line in lines:
                    if line.startswith(b"data:"):
                        event = line[5:].strip()
                        ended = ended or event == DONE
                        if event != DONE:
                            yield _piece(at, event)
            if not ended:
                raise Unavailable("the stream ended before [DONE]")

    async def page(self, path: str) -> str | None:
        """A page of the server, ``None`` if it has none."""
        with suppress(KvrelayError):
            async with self._connections.request("GET", path, {}) as response:
                text = await response.text(EVENT_BYTES)
                return text if response.status == 200 else None
        return None

    async def close(self) -> None:
        await self._connections.close()

    async def find_model(self) -> HttpDoor:
        """This door; with the server's first model if none was named."""
        if self._options.model:
            return self
        token = next(iter(self._options.tokens.values()), None)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with self._connections.request("GET", "/v1/models", headers) as response:
            text = await response.text()
        with suppress(ValueError, LookupError, TypeError):
            name = json.loads(text)["data"][0]["id"]
            self._options = replace(self._options, model=str(name))
            return self
        raise Rejected("model", "the server lists none: name it with --model")

    def _body(self, request: LoadRequest) -> Json:
        options = self._options
        body: Json = {
            "model": options.model,
            "max_tokens": request.max_tokens,
            "temperature": options.temperature,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.chat:
            body["messages"] = request.messages()
        else:
            ids = request.ids()
            body["prompt"] = request.text() if ids is None else ids
        if not options.plain:
            body["return_token_ids"] = True
            body["ignore_eos"] = options.ignore_eos
        return body


def _refusal(response: HttpResponse, text: str) -> KvrelayError:
    """The error of a response that is no stream."""
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    said = f"HTTP {response.status}: {' '.join(text.split())[:200]}"
    if response.status in REFUSED:
        delay = RETRY_SECONDS
        with suppress(KeyError, ValueError):
            delay = float(response.headers["retry-after"])
        return Exhausted(said, delay)
    return DeadlineExceeded(said) if response.status in TIMED_OUT else Unavailable(said)


def _piece(at: float, event: bytes) -> AnswerPiece:
    try:
        chunk = json.loads(event)
    except ValueError:
        raise Unavailable(f"the server sent an event that is no JSON: {event[:60]!r}") from None
    if not isinstance(chunk, dict):
        raise Unavailable(f"the server sent an event that is no object: {event[:60]!r}")
    if (error := chunk.get("error")) is not None:
        said = error.get("message", error) if isinstance(error, dict) else error
        raise Unavailable(f"the stream ended with an error: {str(said)[:200]}")
    text, ids, finish = "", None, None
    for choice in _dicts(chunk.get("choices")):
        delta = choice.get("delta")
        said = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        text = said if isinstance(said, str) else ""
        listed = choice.get("token_ids")
        ids = listed if isinstance(listed, list) else None
        ended = choice.get("finish_reason")
        finish = ended if isinstance(ended, str) else None
    return AnswerPiece(at, text, ids, finish, _account(chunk.get("usage")))


def _dicts(values: object) -> Iterator[Json]:
    if isinstance(values, list):
        yield from (value for value in values if isinstance(value, dict))


def _account(usage: object) -> ServerAccount | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    prompt = _count(usage, "prompt_tokens") or 0
    known = {} if cached is None else {"cached": cached, "computed": prompt - cached}
    return ServerAccount(
        prompt_tokens=prompt,
        completion_tokens=_count(usage, "completion_tokens") or 0,
        total_tokens=_count(usage, "total_tokens"),
        sources=known,
    )


def _count(usage: Json, name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int else None
