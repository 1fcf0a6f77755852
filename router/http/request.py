"""One request of the HTTP door: its body, a call for each of its prompts, and their one answer.

The first call receives the body, as any call receives its message; the others begin then, and the
first is accepted after them. A failure of one prompt ends the request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from kvrelay.errors import Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.tracing import OFF, Span
from kvrelay.structured import FIELD as STRUCTURED
from kvrelay.text.tokenizer import NoTokenizer
from kvrelay.v1 import router_pb2, types_pb2
from router.generate.record import RequestRecord
from router.generate.request import OTHER_PROMPT, InboundCall
from router.http.answer import Answer
from router.http.ask import AnswerForm, Ask, constraint_name, read_ask
from router.http.backend import Backend, Responses
from router.http.errors import name_of
from router.http.exchange import Exchange, JsonObject
from router.http.resume import (
    HEADER,
    Resumption,
    SamplePosition,
    StreamId,
    digest,
    has_reached,
    hash_of,
    parse_event_id,
    request_digest,
    set_outputs,
)
from router.http.shapes import AnswerHead, ChatShape, CompletionShape
from router.queue.gate import HeldRequest
from router.queue.inbox import Inbound, Read, Sender, reading
from router.queue.quotas import QuotaHold
from router.workers.fleet import weights_of

Response = router_pb2.GenerateResponse
_DECODE = types_pb2.ROLE_DECODE
_BOUND = ("cached_prompt_tokens", "prompt_hash", "weights")  # fields that an event id fills


class HttpRequest:
    """``serve`` it once.

    To resume, the tokens that the client has are generated again and go nowhere: then each prompt
    is sent with them, as a client of gRPC does that has kept them.
    """

    def __init__(
        self,
        backend: Backend,
        chat: bool,
        exchange: Exchange,
        record: RequestRecord,
        span: Span = OFF,
    ) -> None:
        self._backend = backend
        self._span = span
        self._chat = chat
        self._exchange = exchange
        self._record = record
        self._tenant = record.tenant
        self._deadline = Deadline.after(backend.config.timeout)
        self._group = asyncio.TaskGroup()
        self._in_turn = asyncio.Lock()  # several prompts write to one stream
        self._calls = [self._call(self._read, exchange.sender(self._tenant))]
        self._holds: list[QuotaHold] = []
        self._form: AnswerForm | None = None
        self._fills = False  # the length is not in the body
        self._body_digest = b""
        self._messages: list[router_pb2.GenerateRequest] = []  # those that are still needed
        self._cache_salt = ""
        self._echoes: list[str] = []  # prompts that came as text
        self._outputs: dict[int, list[int]] = {}  # of each choice: what the client has
        self._kept = False  # the client has sent them
        self._resumption: Resumption | None = None
        self._answer: Answer | None = None
        self._stream: StreamId | None = None
        self._weights: list[str] = []  # of all prompts: a fleet may serve more than one profile

    async def serve(self) -> None:
        """Send the answer. Raises the error that ends the request."""
        first, error = self._calls[0], None
        first.accepted.add_done_callback(lambda _: self._accepted())
        try:
            async with self._group:
                await self._serve_prompt(0)
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            failed.__traceback__ = None  # its frames have the group
        finally:
            self._calls = []  # they have this request
        if error is not None:
            try:
                raise error  # outside of the group's handler, or the group would be its context
            finally:
                del error  # the error has this frame
        answer = self._answer
        assert answer is not None, "every prompt has a response"
        if answer.form.stream:
            await self._exchange.write(answer.last_events(), more=False)
        else:
            await self._exchange.reply(answer.whole())

    def _call(self, read: Read, sender: Sender, counted: bool = False) -> InboundCall:
        return InboundCall(sender, self._deadline, read, counted, self._span)

    def _accepted(self) -> None:
        """A stream shows that it lives: at once, unless the tokens so far can still mismatch."""
        if self._form is not None and self._form.stream:
            self._exchange.keep_alive(patient=self._resumption is not None)

    async def _read(self) -> Inbound:
        """The first prompt's message, once all others are accepted."""
        exchange = self._exchange
        ask, body_digest = await exchange.read(self._backend.bodies, self._tenant, self._ask_of)
        self._body_digest = body_digest
        self._form = ask.form
        self._check_places(ask)
        self._cache_salt = ask.cache_salt
        if (given := exchange.headers.get(HEADER)) is not None:
            if not ask.form.stream:
                raise Rejected(HEADER, "continues a stream: set stream to true, or leave it out")
            await self._bind(ask, parse_event_id(given, ask.form.choices))
        elif any(message.output_token_ids for message in ask.messages):
            raise Rejected("output_token_ids", f"needs the {HEADER} header of their last event")
        elif len(ask.messages) > 1 and not ask.messages[0].sampling.HasField("seed"):
            ask.seed(secrets.randbits(64))
        if ask.form.echo:
            self._echoes = [message.prompt for message in ask.messages]
        if self._resumption is not None:
            self._messages = list(ask.messages)
        self._fills = ask.fills
        first, *others = [
            Inbound(
                message=one,
                fills=ask.fills and self._resumption is None,
                cache_salt=ask.cache_salt,
                regenerates=self._regenerates(index),
            )
            for index, one in enumerate(ask.messages)
        ]
        for index, inbound in enumerate(others, 1):
            self._calls.append(self._call(reading(inbound), self._calls[0].sender, counted=True))
            self._group.create_task(self._serve_prompt(index))
        if others:
            await asyncio.wait([call.accepted for call in self._calls[1:]])
        return first

    def _ask_of(self, body: JsonObject) -> tuple[Ask, bytes]:
        """The request of a body, and its digest."""
        strict = self._backend.config.strict_fields
        ask = read_ask(body, self._chat, self._exchange.request_id, strict)
        return ask, request_digest(ask.messages, self._tenant.name)

    def _check_places(self, ask: Ask) -> None:
        """Each choice counts as a request: refuse more than there may ever be."""
        choices, config, tenant = ask.form.choices, self._backend.config, self._tenant
        if ask.form.prompts == 1:
            return  # the router refuses too many samples
        if tenant.max_requests is not None and choices > tenant.max_requests:
            raise Rejected(
                "prompt",
                f"{choices} answers count as so many requests, and tenant {tenant.name!r} may have"
                f" {tenant.max_requests} open",
            )
        if choices > config.max_requests:
            raise Rejected(
                "prompt",
                f"{choices} answers, and this router has --max-requests {config.max_requests}",
            )

    async def _serve_prompt(self, index: int) -> None:
        call, record = self._calls[index], self._record
        serve, resumed = self._backend.serve, HEADER in self._exchange.headers
        try:
            with self._backend.held(self._tenant, self._holds) as held:
                opened = self._continued(index, held) if resumed else serve(call, record, held)
                async with aclosing(opened) as responses:
                    async for response in responses:
                        if len(self._calls) == 1:
                            await self._take(response)
                        else:
                            await self._take_in_turn(index, response)
        except (Mismatch, Rejected) as error:
            if (name := self._name_of(error.field, index)) == error.field:
                raise
            raise type(error)(name, error.message) from error

    def _name_of(self, field: str, prompt: int) -> str:
        """The name of a field in the body, where it depends on the request."""
        name = name_of(field)
        if field in _BOUND:
            return HEADER
        if self._form is not None:
            if field.startswith(STRUCTURED):
                return constraint_name(field, self._form.by_format)
            if field == "max_tokens":
                bound = self._fills and self._resumption is not None
                return HEADER if bound else self._form.limit_name
        if len(self._calls) > 1 and name.startswith("prompt"):
            return f"prompt[{prompt}]{name.removeprefix('prompt')}"
        return field

    async def _take_in_turn(self, prompt: int, response: Response) -> None:
        """The first call is accepted last: then the tokens of all prompts are known."""
        await asyncio.wait([self._calls[0].accepted])
        response.index += prompt * self._asked.samples
        async with self._in_turn:
            await self._take(response)

    async def _take(self, response: Response) -> None:
        answer = self._answer or self._begin(response)
        if response.weights and response.weights not in self._weights:
            self._note_weights(answer, response.weights)
        if not answer.form.stream:
            answer.take(response)
        elif events := answer.events(response):
            await self._exchange.write(events)

    async def _continued(self, index: int, held: HeldRequest) -> Responses:
        """The responses of a prompt after the position of the client."""
        call, serve = self._calls[index], self._backend.serve
        async with aclosing(serve(call, self._record, held)) as responses:
            outputs: list[list[int]] = []
            async for response in responses:
                if not self._regenerates(index):
                    yield response
                    continue
                positions = self._positions(index)
                outputs = outputs or [[] for _ in positions]
                outputs[response.index].extend(token.id for token in response.tokens)
                if has_reached(outputs, positions):
                    break
            else:
                if self._regenerates(index):
                    raise Mismatch(HEADER, "the answer ends before this position")
                return
        message, begin = self._messages[index], index * self._asked.samples
        surplus = sum(map(len, outputs)) - sum(at.tokens for at in positions)
        held.quota.used -= surplus  # made and counted again by the next call
        outputs = [tokens[: at.tokens] for tokens, at in zip(outputs, positions, strict=True)]
        set_outputs(message, outputs, positions)
        self._outputs.update(enumerate(outputs, begin))
        received_at = call.accepted.result().received_at
        inbound = Inbound(message=message, cache_salt=self._cache_salt, received_at=received_at)
        again = self._call(reading(inbound), replace(call.sender, nbytes=message.ByteSize()))
        async with aclosing(serve(again, self._record, held)) as responses:
            async for response in responses:
                yield response

    def _begin(self, first: Response) -> Answer:
        """The answer, of which this is the first response."""
        form, requests = self._asked, [call.accepted.result() for call in self._calls]
        resumption = self._resumption
        prompt_hash = hash_of(requests)
        if resumption is not None and resumption.stream.prompt_hash != prompt_hash:
            raise Mismatch(HEADER, OTHER_PROMPT)
        created = int(time.time()) if resumption is None else resumption.stream.created
        head = AnswerHead(
            id=f"{'chatcmpl' if self._chat else 'cmpl'}-{first.request_id}",
            created=created,
            model=self._backend.config.model_name,
            fingerprint=first.weights,
        )
        self._stream = StreamId(
            seed=requests[0].sampling.seed,
            max_tokens=requests[0].max_tokens,
            prompt_hash=prompt_hash,
            created=created,
            body=self._body_digest,
            weights=digest(first.weights.encode()),
            request_id=first.request_id,
        )
        self._weights = [first.weights]
        kind = ChatShape if self._chat else CompletionShape
        prompts = [request.prompt for request in requests]
        shape = kind(head, self._backend.tokenizer, form, prompts, self._outputs)
        made = Answer(form, prompts, shape, str(self._stream), self._echoed(prompts))
        if resumption is not None:
            made.resume(resumption)
        self._answer = made
        return made

    def _note_weights(self, answer: Answer, weights: str) -> None:
        """Another prompt runs on another numeric profile: no worker can resume both."""
        assert self._stream is not None, "the answer has begun"
        self._weights.append(weights)
        mixed = digest("\n".join(sorted(self._weights)).encode())
        answer.stream = str(replace(self._stream, weights=mixed))

    def _echoed(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The text before each prompt's output."""
        if not self._asked.echo:
            return [""] * len(prompts)
        tokenizer = self._backend.tokenizer
        if isinstance(tokenizer, NoTokenizer):
            raise tokenizer.refusal("echo")
        texts = zip(self._echoes, prompts, strict=True)
        return [text or tokenizer.decode(prompt) for text, prompt in texts]

    def _regenerates(self, prompt: int) -> bool:
        """Whether the client has tokens of a prompt and did not send them."""
        if self._resumption is None or self._kept:
            return False
        return any(at.tokens for at in self._positions(prompt))

    def _positions(self, prompt: int) -> Sequence[SamplePosition]:
        """What the client has of the samples of a prompt."""
        assert self._resumption is not None, "the request has the header"
        samples = self._asked.samples
        return self._resumption.samples[prompt * samples : (prompt + 1) * samples]

    @property
    def _asked(self) -> AnswerForm:
        assert self._form is not None, "the body is read first"
        return self._form

    async def _bind(self, ask: Ask, given: Resumption) -> None:
        """Make the messages continue the stream of an event's id."""
        given.check(self._body_digest)
        stream, several = given.stream, len(ask.messages) > 1
        weights = await self._served(stream.weights)
        seeded = ask.messages[0].sampling.HasField("seed")
        if seeded and ask.messages[0].sampling.seed != stream.seed:
            raise Rejected(HEADER, "is no id of an event of this request: it has another seed")
        for message, at in zip(ask.messages, given.samples[:: ask.form.samples], strict=True):
            if at.hit is not None:
                message.cached_prompt_tokens = at.hit
            message.resumes = True
            if ask.fills:
                message.max_tokens = stream.max_tokens
            message.request_id = stream.request_id
            message.sampling.seed = stream.seed
            message.prompt_hash = 0 if several else stream.prompt_hash
            message.weights = weights
        if several and not seeded:
            ask.seed(stream.seed)
        known = list(ask.messages[0].output_token_ids)
        if known and (len(given.samples) > 1 or len(known) != given.samples[0].tokens):
            raise Rejected(
                "output_token_ids", f"has {len(known)} ids, not those of the {HEADER} header"
            )
        self._kept = bool(known)
        self._outputs[0] = known
        self._resumption = given

    async def _served(self, wanted: bytes) -> str:
        """The weights and profile with this digest, as a worker serves them."""
        registry, config = self._backend.registry, self._backend.config

        def found() -> str | None:
            known = (w.info.namespace for w in registry.members(_DECODE) if w.info is not None)
            every = map(weights_of, known)
            return next((one for one in every if digest(one.encode()) == wanted), None)

        waiting = self._deadline.earlier(config.resume_wait)
        await registry.wait_for(lambda: bool(registry.usable(_DECODE)), waiting)
        waiting = waiting.earlier(config.worker_wait)
        await registry.wait_for(lambda: found() is not None, waiting)
        if (weights := found()) is None:
            raise Mismatch(
                HEADER, "no worker serves the weights and numeric profile that it began with"
            )
        return weights
