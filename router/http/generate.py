"""``/v1/completions`` and ``/v1/chat/completions``: whole answers and streams of events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import KvrelayError
from kvrelay.rpc.deadline import Deadline
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.config import RouterConfig
from router.generate.request import AcceptedRequest, InboundCall
from router.http.access import Access
from router.http.ask import Ask, read_ask
from router.http.errors import body_of
from router.http.exchange import Exchange
from router.http.fields import parse_object
from router.http.shapes import (
    AnswerChoice,
    AnswerHead,
    AnswerShape,
    ChatShape,
    CompletionShape,
    Json,
    dump,
    usage_of,
)
from router.placement.placer import Placer
from router.workers.registry import Registry

log = logging.getLogger("kvrelay.router")
DONE = "data: [DONE]\n\n"


class Backend(Protocol):
    """What the doors of a router share; ``router.service`` implements it."""

    config: RouterConfig
    tokenizer: Tokenizer
    registry: Registry
    placer: Placer

    def serve(self, call: InboundCall) -> AsyncGenerator[router_pb2.GenerateResponse]: ...

    @property
    def draining(self) -> bool: ...


@dataclass(slots=True)
class _Answer:
    """One answer in the making."""

    ask: Ask
    request: AcceptedRequest
    shape: AnswerShape
    generated: int = 0  # output tokens of all choices

    def usage(self, response: router_pb2.GenerateResponse) -> Json:
        """The usage so far, and the cached tokens if this response carries the account."""
        prompt = len(self.request.prompt)
        if not response.HasField("usage"):
            return usage_of(prompt, self.generated, None)
        account = response.usage
        return usage_of(prompt, account.completion_tokens, account.cached_prompt_tokens)

    def events(self, response: router_pb2.GenerateResponse, first: bool) -> str:
        """The events of one response; empty while there is nothing to show."""
        before = usage_of(len(self.request.prompt), 0, None) if self.ask.continuous else None
        begun = self.shape.first(0, self._shown(before), self.request.prompt) if first else None
        self.generated += len(response.tokens)
        part = AnswerChoice()
        part.take(response)
        text = "" if begun is None else f"data: {begun}\n\n"
        if part.text or part.finish or self.ask.token_ids or self.ask.logprobs:
            usage = self.usage(response) if self.ask.continuous else None
            text += f"data: {self.shape.chunk(0, part, self._shown(usage))}\n\n"
        return text

    def last_events(self, response: router_pb2.GenerateResponse) -> str:
        """The events after the last choice has ended."""
        usage = self.shape.usage_chunk(self.usage(response)) if self.ask.usage else None
        return DONE if usage is None else f"data: {usage}\n\n{DONE}"

    def _shown(self, usage: Json | None) -> Json | bool | None:
        """``null`` in every chunk but the last if the client asked for usage, else nothing."""
        return usage if self.ask.usage else False


class Generate:
    """The two endpoints that generate; they differ in the shape of body and answer."""

    def __init__(self, backend: Backend, access: Access, chat: bool) -> None:
        self._backend = backend
        self._access = access
        self._chat = chat

    async def __call__(self, exchange: Exchange) -> None:
        config = self._backend.config
        deadline = Deadline.after(min(config.default_timeout, config.max_timeout))
        with self._access.admitted(exchange.headers) as caller:
            exchange.check()
            asked: list[Ask] = []

            async def read() -> router_pb2.GenerateRequest:
                values = parse_object(await exchange.body())
                ask = read_ask(values, self._chat, exchange.request_id, config.strict_fields)
                call.fills = ask.fills
                asked.append(ask)
                return ask.message

            call = InboundCall(caller.tenant, deadline, read)
            async with exchange.attended(), aclosing(self._backend.serve(call)) as responses:
                first = await anext(responses)
                assert call.accepted is not None, "a response follows acceptance"
                answer = _Answer(asked[0], call.accepted, self._shape(asked[0], call, first))
                if answer.ask.stream:
                    await _stream(exchange, answer, first, responses)
                else:
                    await _whole(exchange, answer, first, responses)

    def _shape(
        self, ask: Ask, call: InboundCall, first: router_pb2.GenerateResponse
    ) -> AnswerShape:
        kind = ChatShape if self._chat else CompletionShape
        head = AnswerHead(
            id=f"{'chatcmpl' if self._chat else 'cmpl'}-{first.request_id}",
            created=int(time.time()),
            model=self._backend.config.model_name,
            fingerprint=first.weights,
        )
        return kind(head, self._backend.tokenizer, ask.token_ids)


async def _whole(
    exchange: Exchange,
    answer: _Answer,
    first: router_pb2.GenerateResponse,
    rest: AsyncGenerator[router_pb2.GenerateResponse],
) -> None:
    choice, last = AnswerChoice(), first
    choice.take(first)
    async for response in rest:
        choice.take(response)
        last = response
    usage = answer.usage(last)
    await exchange.reply(answer.shape.whole([choice], usage, answer.request.prompt))


async def _stream(
    exchange: Exchange,
    answer: _Answer,
    first: router_pb2.GenerateResponse,
    rest: AsyncGenerator[router_pb2.GenerateResponse],
) -> None:
    """An error after the beginning is an event: the status has been sent."""
    await exchange.start_events()
    last = first
    try:
        await _send(exchange, answer.events(first, True))
        async for response in rest:
            last = response
            await _send(exchange, answer.events(response, False))
    except KvrelayError as error:
        await exchange.write(f"data: {dump(body_of(error))}\n\n{DONE}", more=False)
        return
    await exchange.write(answer.last_events(last), more=False)


async def _send(exchange: Exchange, events: str) -> None:
    if events:
        await exchange.write(events)
