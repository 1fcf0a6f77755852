"""The door of an OpenAI server: ``/v1/completions`` and ``/v1/chat/completions``, streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.load.openai_server import Json, OpenAIServer
from kvrelay.load.request import AnswerPiece, ChosenToken, LoadRequest, ServerAccount
from kvrelay.rpc.security.tls import HttpsClient

LARGEST = 1 << 53  # numbers below it are exact in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorOptions:
    """``plain``: only fields of OpenAI's own API.

    ``tokens``: the bearer token of each tenant, of "" for those that have none. ``https``: for a
    server whose certificate the system does not trust.
    """

    model: str = ""
    temperature: float = 0.0
    chat: bool = False
    plain: bool = False
    ignore_eos: bool = True
    tokens: Mapping[str, str] = field(default_factory=dict)
    https: HttpsClient | None = None


class HttpDoor:
    """One server. Connections are kept and used again."""

    def __init__(self, url: str, options: DoorOptions, field: str = "url") -> None:
        self.server = OpenAIServer(url, field, options.https)
        self._options = options

    async def ask(self, request: LoadRequest, timeout: float) -> AsyncGenerator[AnswerPiece, None]:  # noqa: ASYNC109 - the caller has the clock
        path = "/v1/chat/completions" if self._options.chat else "/v1/completions"
        tokens = self._options.tokens
        token = tokens.get(request.tenant) or tokens.get("")
        async with aclosing(self.server.events(path, self._body(request), token)) as events:
            async for at, event in events:
                for piece in _pieces(at, event):
                    yield piece

    @property
    def model(self) -> str:
        return self._options.model

    @property
    def _token(self) -> str | None:
        """For what is asked for no tenant."""
        return next(iter(self._options.tokens.values()), None)

    async def page(self, path: str) -> str | None:
        """A page of the server, ``None`` if it has none or does not show it."""
        return await self.server.page(path, self._token)

    def use_chat(self) -> None:
        """From now on."""
        self._options = replace(self._options, chat=True)

    async def close(self) -> None:
        await self.server.close()

    async def find_model(self) -> HttpDoor:
        """This door; with the server's first model if none was named. Closed if it fails."""
        if not self._options.model:
            try:
                model = await self.server.model(self._token)
            except KvrelayError:
                await self.close()
                raise
            self._options = replace(self._options, model=model)
        return self

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
        body |= request.fields
        return {name: value for name, value in body.items() if value is not None}


def _pieces(at: float, event: Json) -> Iterator[AnswerPiece]:
    """One of each choice; the usage is that of the whole answer."""
    account = _account(event.get("usage"))
    for choice in _dicts(event.get("choices")):
        delta, index = choice.get("delta"), choice.get("index")
        said = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        listed, ended = choice.get("token_ids"), choice.get("finish_reason")
        chosen = choice.get("logprobs")
        yield AnswerPiece(
            at,
            said if isinstance(said, str) else "",
            _token_ids(listed) if isinstance(listed, list) else None,
            ended if isinstance(ended, str) else None,
            choice=index if isinstance(index, int) else 0,
            chosen=() if chosen is None else tuple(_chosen(chosen)),
        )
    if account is not None:
        yield AnswerPiece(at, account=account)


def _chosen(logprobs: object) -> Iterator[ChosenToken]:
    """In the shape of a chat or of a completion."""
    if not isinstance(logprobs, dict):
        return
    for one in _dicts(logprobs.get("content")):
        yield ChosenToken(str(one.get("token")), _number(one.get("logprob")))
    tokens, chances = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if isinstance(tokens, list) and isinstance(chances, list):
        for text, chance in zip(tokens, chances, strict=False):
            yield ChosenToken(str(text), _number(chance))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def _token_ids(listed: list[object]) -> list[int]:
    ids = [value for value in listed if type(value) is int and 0 <= value < LARGEST]
    if len(ids) < len(listed):
        raise Unavailable(f"the server sent token_ids that are not token ids: {str(listed)[:60]}")
    return ids


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
    if type(value) is not int:
        return None
    if abs(value) >= LARGEST:
        raise Unavailable(
            f"the server's usage has a number of {len(str(abs(value)))} digits: {name}"
        )
    return value
