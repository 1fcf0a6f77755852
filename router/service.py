"""The ``RouterService`` of protos/kvrelay/v1/router.proto: a request's path through the router.

A request passes quota and open requests once, then each of its calls acceptance, queue and legs,
in this order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TypeAlias, TypeVar

import grpc

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.process import logs
from kvrelay.rpc import tracing
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Tenant, caller
from kvrelay.rpc.server.connections import network_of_peer
from kvrelay.rpc.server.errors import Read, reads_late
from kvrelay.rpc.tracing import Span
from kvrelay.text.structured import GrammarCompiler
from kvrelay.text.tokenizer import Tokenizer, eos_token_ids
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.config import RouterConfig
from router.generate.record import Door, RequestRecord, name_of
from router.generate.request import (
    InboundCall,
    build,
    check_envelope,
    check_length,
    check_request_id,
    check_tokenizable,
    is_resumed,
    most_tokens,
    salted,
    samples_of,
)
from router.generate.retry import PoisonList, RetryControl, RetryLimits, TokenBucket
from router.generate.samples import Samples
from router.generate.shared import SharedParts
from router.generate.spans import AnswerSpan, note_request
from router.latency import RequestHistograms, RequestTimes
from router.placement.placer import Placer
from router.queue.gate import HeldRequest, QueueGate
from router.queue.grammars import GrammarChecks
from router.queue.hints import HintQueue
from router.queue.inbox import Inbound, Inbox, Sender
from router.queue.prompts import PromptTokenizer, TextThreads
from router.queue.quotas import QuotaHold, Quotas
from router.queue.reasoning import ReasoningSupport
from router.queue.tools import ToolSupport, constrain
from router.workers.candidate import longest, too_long
from router.workers.registry import Registry

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
GENERATE = f"{SERVICE}/Generate"

Q = TypeVar("Q")
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Q, R]"  # generic in the type stubs only


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The state of a request is in its ``Generation``; totals are counted here."""

    def __init__(self, config: RouterConfig, registry: Registry, tokenizer: Tokenizer) -> None:
        self.inbox = Inbox(config.message_bytes)
        self.tokenizer = tokenizer
        self._prompts = PromptTokenizer(tokenizer, config.max_prompt)
        threads = self._prompts.threads
        self.bodies = TextThreads(config.message_bytes)
        endings = eos_token_ids(config.model)
        compiler = GrammarCompiler(tokenizer, endings)
        compiler.load_ahead()
        self._grammars = GrammarChecks(compiler, threads)
        self._tools = ToolSupport(tokenizer, config.tool_format, compiler, threads)
        self._reasoning = ReasoningSupport(tokenizer, config.reasoning_format)
        self.config = config
        self.registry = registry
        self.quotas = Quotas(time.monotonic)
        self.latency = RequestHistograms()
        inbox, bodies = self.inbox, self.bodies
        semaphores = inbox.semaphore, inbox.small, bodies.semaphore, threads.semaphore
        self.gate = QueueGate(registry, semaphores, config, self.latency.queue.observe)
        self.placer = Placer(registry, config)
        self.hints = HintQueue(enabled=config.store is not None)
        self.retry = RetryControl(
            RetryLimits(config.max_failures, config.max_deaths, silence=config.unreachable_after),
            PoisonList(config.poison_seconds),
            TokenBucket(config.migration_rate, config.migration_burst),
        )
        self._parts = SharedParts(
            registry=registry,
            placer=self.placer,
            retry=self.retry,
            threads=threads,
            tokenizer=tokenizer,
            eos_token_ids=endings,
            handoff_wait=config.handoff_wait,
        )
        self._naming = set[asyncio.Task[None]]()  # of answers that have ended, for hints
        self.ended = Counter[str]()  # requests, by how they ended
        self.totals = router_pb2.RouterTotals()

    @reads_late
    async def Generate(
        self,
        read: Read[router_pb2.GenerateRequest],
        context: Context[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
    ) -> AsyncGenerator[router_pb2.GenerateResponse]:
        config = self.config
        deadline = Deadline.from_context(context, config.default_timeout, config.max_timeout)

        async def receive() -> Inbound:
            return Inbound(message=await read())

        headers = tracing.headers_of(context)
        about = {"rpc.system.name": "grpc", "rpc.method": GENERATE}
        tenant = caller().tenant
        with (
            tracing.serving(GENERATE, headers, about) as span,
            self.counted(tenant, "grpc", context.peer()) as record,
        ):
            sender = Sender(tenant, network_of_peer(context.peer()))
            call = InboundCall(sender, deadline, receive, span=span)
            with self.held(tenant) as held:
                async with aclosing(self.serve(call, record, held)) as responses:
                    async for response in responses:
                        yield response

    @contextmanager
    def counted(self, tenant: Tenant, door: Door, peer: str) -> Iterator[RequestRecord]:
        """One request of a client: it counts once, by how it ended, and has one access line."""
        record, ended = RequestRecord(tenant, door, peer), "cancelled"
        try:
            yield record
            ended = record.failed or "finished"
        except KvrelayError as error:
            ended = name_of(error)
            raise
        except Exception:
            ended = "internal"
            raise
        finally:
            self.ended[ended] += 1
            if self.config.access_log:
                record.write(ended)

    @contextmanager
    def held(self, tenant: Tenant, group: list[QuotaHold] | None = None) -> Iterator[HeldRequest]:
        """Hold quota and a place for one prompt, over all calls that serve it.

        ``Exhausted`` if there is no place or the tokens of this minute are used, ``Unavailable``
        while the router drains; both before the message is read. ``group``: as in ``Quotas.hold``.
        """
        with self.quotas.hold(tenant, group) as quota, self.gate.entered(tenant) as entry:
            quota.charge(0)
            yield HeldRequest(quota, entry)

    async def serve(
        self, call: InboundCall, record: RequestRecord, held: HeldRequest
    ) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses to one call, of whichever door; closing the stream cancels its work.

        ``record`` is that of the client's request.
        """
        with call.span.child("generate") as span:
            call.deadline.check("to begin")
            samples = await self._accept(call, held.quota, span)
            self.gate.widen(held.entry, samples.places)
            times = RequestTimes(self.latency, samples.request, resumed=samples.resumed)
            answer, goes_out = AnswerSpan(span), not samples.request.regenerates
            async with aclosing(self._hinted(samples)) as responses:
                async for response in responses:
                    held.quota.used += len(response.tokens)
                    if span.on and goes_out:
                        answer.take(response)
                    if goes_out:
                        record.take(response)
                        self._count(response, times.take(response))
                    yield response
            if goes_out:
                times.finished()

    async def Announce(
        self,
        request: router_pb2.AnnounceRequest,
        context: Context[router_pb2.AnnounceRequest, router_pb2.AnnounceResponse],
    ) -> router_pb2.AnnounceResponse:
        if request.leaving:
            self.registry.leave(request.address)
            return router_pb2.AnnounceResponse(state=router_pb2.WORKER_STATE_DRAINING)
        status = self.registry.announce(request.address, request.ttl_seconds).status()
        return router_pb2.AnnounceResponse(state=status.state, reason=status.reason)

    async def ListWorkers(
        self,
        request: router_pb2.ListWorkersRequest,
        context: Context[router_pb2.ListWorkersRequest, router_pb2.ListWorkersResponse],
    ) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(
            workers=[worker.status() for worker in self.registry.workers],
            queue=self.queue_status(),
            totals=self.totals,
        )

    @property
    def refused(self) -> Counter[str]:
        """Requests refused for lack of room or quota, by reason."""
        return self.gate.refused + self.quotas.refused

    @property
    def draining(self) -> bool:
        """Whether this router refuses new requests for good."""
        return self.gate.draining

    def queue_status(self) -> router_pb2.QueueStatus:
        """Waiting, running and refused requests."""
        return self.gate.status(self.refused.total())

    async def _accept(self, call: InboundCall, hold: QuotaHold, span: Span) -> Samples:
        """The samples of a request, charged to its tenant; raises if the request is refused."""
        tenant, deadline, placer = call.tenant, call.deadline, self.placer
        async with self._received(call) as inbound:
            message = inbound.message
            if message.request_id:
                check_request_id(message.request_id)
                logs.serves(message.request_id)
            check_envelope(message, self.config.model_name)
            resumes = is_resumed(message)
            info = await placer.info(deadline, message.weights, resumes)
            check_length(message, info.max_model_len)
            workers = placer.candidates()
            async with deadline.limit("to tokenize the prompt"):
                tools = await self._tools.use(message, tenant)
                with self.latency.tokenize.time(), span.child("tokenize"):
                    prompt = await self._prompts.tokenize(message, hold, longest(workers))
                words = await self._prompts.bad_words(message.sampling.bad_words, tenant)
            if inbound.fills:
                count = samples_of(message)
                message.max_tokens = most_tokens(len(prompt), longest(workers), tenant, count)
                check_envelope(message, self.config.model_name)
            tenant = salted(tenant, inbound.cache_salt)
            request = build(message, prompt, words, info, deadline, tenant)
            logs.serves(request.id)
            start = self._reasoning.start(message, prompt)
            request = replace(
                request,
                received_at=inbound.received_at,
                regenerates=inbound.regenerates,
                tools=tools,
                reasoning=start,
                span=span,
            )
            if span.on:
                note_request(span, message, request, self.config.model_name)
            constrain(request.sampling, tools, start)
            async with deadline.limit("to compile the grammar"):
                await self._grammars.check(request.sampling, tenant)
        if request.positions > longest(workers):
            raise too_long(request.positions, workers)
        samples = Samples(request, placer.bind(info, prompt, tenant), self._parts, hold)
        if samples.places > self.config.max_requests:
            most = self.config.max_requests
            raise Rejected(
                "n", f"{samples.places} samples, and this router has --max-requests {most}"
            )
        self.gate.check_samples(samples.places, request.max_tokens)
        hold.widen(samples.places)
        if not hold.charged:  # else by the call that regenerated its output
            hold.charge(samples.charged_tokens)
        call.accepted.set_result(request)
        return samples

    @asynccontextmanager
    async def _received(self, call: InboundCall) -> AsyncIterator[Inbound]:
        if call.counted:
            yield await call.read()
            return
        async with self.inbox.received(call.read, call.sender, call.deadline) as inbound:
            yield inbound

    async def tokenize(
        self, call: InboundCall, named: Callable[[], bool]
    ) -> tuple[tuple[int, ...], list[str | None] | None]:
        """The token ids of a call's input, and their names if its message asks for them.

        It costs the tenant what a refused request does.
        """
        async with self._converted(call, "to tokenize the prompt") as (message, hold):
            await self._tools.use(message, call.tenant)
            ids = await self._prompts.tokenize(message, hold, self.config.max_prompt)
            return ids, await self._prompts.names(ids, call.tenant) if named() else None

    async def detokenize(self, call: InboundCall) -> str:
        """The text of the token ids of a call. It costs as much as ``tokenize`` does."""
        async with self._converted(call, "to decode the tokens") as (message, hold):
            return await self._prompts.decode(message.token_ids.ids, hold)

    @asynccontextmanager
    async def _converted(
        self, call: InboundCall, what: str
    ) -> AsyncIterator[tuple[router_pb2.GenerateRequest, QuotaHold]]:
        with self.quotas.hold(call.tenant) as hold, self.gate.entered(call.tenant):
            hold.charge(0)
            async with self._received(call) as inbound:
                check_tokenizable(inbound.message, self.config.model_name)
                async with call.deadline.limit(what):
                    yield inbound.message, hold

    async def _hinted(self, samples: Samples) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses; the store learns that the prompt waits, then what the client expects."""
        request, output = samples.request, list[int]()
        tenant, names = request.tenant.name, samples.bound.prefix.names
        tells_end = self.hints.enabled and request.retention
        with self.hints.waiting(names, tenant, time.monotonic()) as waits_no_longer:
            async with aclosing(samples.responses(self.gate)) as responses:
                async for response in responses:
                    waits_no_longer()
                    if tells_end and not response.index:
                        output += [token.id for token in response.tokens]
                    yield response
        if tells_end:
            task = asyncio.create_task(self._tell_end(samples, output))
            self._naming.add(task)
            task.add_done_callback(self._naming.discard)

    async def _tell_end(self, samples: Samples, output: list[int]) -> None:
        """Name the blocks of an answer, in a thread, and tell the store what comes next."""
        request = samples.request
        tokens = (*request.prompt, *request.outputs, *output)
        names = await asyncio.to_thread(samples.bound.names_of, tokens)
        self.hints.ended(names, request.retention, request.tenant.name, time.monotonic())

    def _count(
        self, response: router_pb2.GenerateResponse, first_token_seconds: float | None
    ) -> None:
        """Add a response to the totals."""
        totals = self.totals
        if first_token_seconds is not None:
            totals.first_tokens += 1
            totals.first_token_seconds += first_token_seconds
        totals.generation_tokens += len(response.tokens)
        if response.HasField("usage"):
            totals.prompt_tokens += response.usage.prompt_tokens
            totals.cached_prompt_tokens += response.usage.cached_prompt_tokens
