"""``/v1/completions`` and ``/v1/chat/completions``: whole answers and streams of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from kvrelay.errors import KvrelayError, Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from kvrelay.v1 import router_pb2, types_pb2
from router.config import RouterConfig
from router.generate.request import InboundCall
from router.http.access import Access
from router.http.answer import DONE, Answer, reached
from router.http.ask import Ask, read_ask
from router.http.errors import body_of
from router.http.exchange import Exchange
from router.http.fields import parse_object
from router.http.resume import (
    HEADER,
    Resumption,
    StreamId,
    digest,
    parse_event_id,
    request_digest,
)
from router.http.shapes import AnswerHead, ChatShape, CompletionShape, dump
from router.placement.placer import Placer
from router.workers.fleet import weights_of
from router.workers.registry import Registry

Responses = AsyncGenerator[router_pb2.GenerateResponse]


class Backend(Protocol):
    """What the doors of a router share; ``router.service`` implements it."""

    config: RouterConfig
    tokenizer: Tokenizer
    registry: Registry
    placer: Placer

    def serve(self, call: InboundCall) -> Responses: ...

    async def tokenize(self, call: InboundCall) -> tuple[int, ...]: ...

    @property
    def draining(self) -> bool: ...


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
            request = _Request(self._backend, self._chat, exchange)
            call = InboundCall(caller.tenant, deadline, request.read)
            request.call = call
            resumed = HEADER in exchange.headers
            opened = request.continued() if resumed else self._backend.serve(call)
            async with exchange.attended(), aclosing(opened) as responses:
                first = await anext(responses)
                answer = request.answer(first)
                send = _stream if answer.ask.stream else _whole
                await send(exchange, answer, first, responses)


class _Request:
    """One request, from its body to the beginning of its answer.

    To resume, the tokens that the client has are generated again and go nowhere: then the request
    is sent with them, as a client of gRPC does that has kept them.
    """

    def __init__(self, backend: Backend, chat: bool, exchange: Exchange) -> None:
        self._backend = backend
        self._chat = chat
        self._exchange = exchange
        self._body = b""  # its digest
        self.ask: Ask | None = None
        self.call: InboundCall | None = None
        self._resumption: Resumption | None = None

    async def read(self) -> router_pb2.GenerateRequest:
        """The message of the body."""
        exchange, config = self._exchange, self._backend.config
        values = parse_object(await exchange.body())
        ask = read_ask(values, self._chat, exchange.request_id, config.strict_fields)
        message, call = ask.message, self._call
        call.fills = ask.fills
        call.cache_salt = ask.cache_salt
        self.ask = ask
        self._body = request_digest(message)
        if (given := exchange.headers.get(HEADER)) is not None:
            await self._bind(message, parse_event_id(given, ask.samples), call.deadline)
        elif message.output_token_ids:
            raise Rejected("output_token_ids", f"needs the {HEADER} header of their last event")
        return message

    async def continued(self) -> Responses:
        """The responses after the position of the client."""
        async with aclosing(self._backend.serve(self._call)) as responses:
            outputs: list[list[int]] = []
            async for response in responses:
                ask, resumption = self._asked, self._resumption
                assert resumption is not None, "the request has the header"
                if ask.message.output_token_ids:  # the client has sent what it has
                    yield response
                    continue
                outputs = outputs or [[] for _ in range(ask.samples)]
                outputs[response.index].extend(token.id for token in response.tokens)
                if reached(outputs, resumption.samples):
                    break
            else:
                if outputs:
                    raise Mismatch(HEADER, "the answer ends before this position")
                return
        _set_outputs(ask.message, outputs, resumption)
        self._continue_from(ask)
        async with aclosing(self._backend.serve(self._call)) as responses:
            async for response in responses:
                yield response

    def _continue_from(self, ask: Ask) -> None:
        async def read() -> router_pb2.GenerateRequest:
            return ask.message

        self.call = replace(self._call, read=read)

    def answer(self, first: router_pb2.GenerateResponse) -> Answer:
        """The answer that begins with this response."""
        ask, request, resumption = self._asked, self._call.accepted, self._resumption
        assert request is not None, "a response follows acceptance"
        kind = ChatShape if self._chat else CompletionShape
        created = int(time.time()) if resumption is None else resumption.stream.created
        head = AnswerHead(
            id=f"{'chatcmpl' if self._chat else 'cmpl'}-{first.request_id}",
            created=created,
            model=self._backend.config.model_name,
            fingerprint=first.weights,
        )
        stream = StreamId(
            seed=request.sampling.seed,
            prompt_hash=request.prompt_hash,
            created=created,
            body=self._body,
            weights=digest(first.weights.encode()),
            request_id=first.request_id,
        )
        shape = kind(head, self._backend.tokenizer, ask.token_ids)
        echo = self._echo(ask, request.prompt)
        made = Answer(ask, request, shape, str(stream), echo)
        if resumption is not None:
            made.resume(resumption)
        return made

    @property
    def _asked(self) -> Ask:
        assert self.ask is not None, "read() comes first"
        return self.ask

    @property
    def _call(self) -> InboundCall:
        assert self.call is not None, "set before it is served"
        return self.call

    def _echo(self, ask: Ask, prompt: tuple[int, ...]) -> str:
        if not ask.echo:
            return ""
        if ask.message.HasField("prompt"):
            return ask.message.prompt
        if isinstance(self._backend.tokenizer, NoTokenizer):
            raise self._backend.tokenizer.refusal("echo")
        return self._backend.tokenizer.decode(prompt)

    async def _bind(
        self, message: router_pb2.GenerateRequest, given: Resumption, deadline: Deadline
    ) -> None:
        given.check(self._body)
        self._resumption = given
        stream, known = given.stream, len(message.output_token_ids)
        message.request_id = stream.request_id
        message.sampling.seed = stream.seed
        message.prompt_hash = stream.prompt_hash
        message.weights = await self._weights(stream.weights, deadline)
        if known and (len(given.samples) > 1 or known != given.samples[0].tokens):
            raise Rejected("output_token_ids", f"has {known} ids, not those of the {HEADER} header")

    async def _weights(self, wanted: bytes, deadline: Deadline) -> str:
        """The weights and profile with this digest, as a worker serves them."""
        registry, config, decode = self._backend.registry, self._backend.config, _DECODE

        def found() -> str | None:
            known = (w.info.namespace for w in registry.members(decode) if w.info is not None)
            every = map(weights_of, known)
            return next((one for one in every if digest(one.encode()) == wanted), None)

        waiting = deadline.earlier(config.resume_wait)
        await registry.wait_for(lambda: bool(registry.usable(decode)), waiting)
        waiting = waiting.earlier(config.worker_wait)
        await registry.wait_for(lambda: found() is not None, waiting)
        if (weights := found()) is None:
            raise Mismatch(
                HEADER, "no worker serves the weights and numeric profile that it began with"
            )
        return weights


_DECODE = types_pb2.ROLE_DECODE


def _set_outputs(
    message: router_pb2.GenerateRequest, outputs: list[list[int]], resumption: Resumption
) -> None:
    """The tokens so far, cut at the positions of the client.

    If all samples have ended, the last one ends again, for its usage.
    """
    message.ClearField("output_token_ids")
    if len(outputs) == 1:
        message.output_token_ids.extend(outputs[0][: resumption.samples[0].tokens])
        return
    for tokens, at in zip(outputs, resumption.samples, strict=True):
        message.samples.add(token_ids=tokens[: at.tokens], ended=at.ended)
    if all(at.ended for at in resumption.samples):
        message.samples[-1].ended = False


async def _whole(
    exchange: Exchange, answer: Answer, first: router_pb2.GenerateResponse, rest: Responses
) -> None:
    answer.take(first)
    async for response in rest:
        answer.take(response)
    await exchange.reply(answer.whole())


async def _stream(
    exchange: Exchange, answer: Answer, first: router_pb2.GenerateResponse, rest: Responses
) -> None:
    """An error after the beginning is an event: the status has been sent."""
    await exchange.start_events()
    try:
        await _send(exchange, answer.events(first))
        async for response in rest:
            await _send(exchange, answer.events(response))
    except KvrelayError as error:
        await exchange.write(f"data: {dump(body_of(error))}\n\n{DONE}", more=False)
        return
    await exchange.write(answer.last_events(), more=False)


async def _send(exchange: Exchange, events: str) -> None:
    if events:
        await exchange.write(events)
