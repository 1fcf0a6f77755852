"""The ``Router`` service: checks a request, runs it, streams the answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeAlias, TypeVar

import grpc

from kvrelay.errors import DeadlineExceeded, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import sampling_of
from kvrelay.rpc.security.identity import Tenant, caller
from kvrelay.rpc.status import code_of
from kvrelay.text.tokenizer import Tokenizer, eos_token_ids
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.config import RouterConfig
from router.generate.generation import Generation
from router.generate.request import build, check_envelope, check_length
from router.placement.placer import Placer, namespace_of
from router.queue.gate import QueueGate
from router.queue.quotas import QuotaHold, Quotas
from router.queue.tokenize import PromptTokenizer
from router.workers.registry import Registry

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
MANY_TOKENS = 4096  # so many make text for some milliseconds: not on the event loop

Q = TypeVar("Q")
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Q, R]"  # generic in the type stubs only


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """All state of requests is in their ``Generation``; the rest is counted here."""

    def __init__(self, config: RouterConfig, registry: Registry, tokenizer: Tokenizer) -> None:
        self._config = config
        self.registry = registry
        self._tokenizer = tokenizer
        self._prompts = PromptTokenizer(tokenizer)
        self._model = config.model_name
        self._eos = eos_token_ids(config.model)
        self.dispatcher = Placer(registry, config)
        self.quotas = Quotas(time.monotonic)
        self.gate = QueueGate(registry, config)
        self.ended = Counter[str]()  # requests, by how they ended
        self.relayed = 0  # tokens
        self._open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def Generate(
        self,
        request: router_pb2.GenerateRequest,
        context: Context[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
    ) -> AsyncGenerator[router_pb2.GenerateResponse]:
        config, tenant = self._config, caller().tenant
        deadline = Deadline.from_context(context, config.default_timeout, config.max_timeout)
        with self._counted(), self._begun(request, deadline, tenant) as place:
            generation = await self._prepare(request, deadline, place)
            turn = self.gate.passed(
                generation.tokens, request.priority, tenant, deadline, generation.part
            )
            async with turn, aclosing(generation.responses()) as responses:
                await self._replay(generation, deadline, tenant)
                place.used = generation.prompt_tokens  # who is refused before has used nothing
                async for response in responses:
                    place.used += len(response.tokens)
                    self.relayed += len(response.tokens)
                    yield response

    async def Announce(
        self,
        request: router_pb2.AnnounceRequest,
        context: Context[router_pb2.AnnounceRequest, router_pb2.AnnounceResponse],
    ) -> router_pb2.AnnounceResponse:
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
        )

    @property
    def refused(self) -> Counter[str]:
        """Requests told to ask again, by reason."""
        return self.gate.refused + self.quotas.refused

    def queue_status(self) -> router_pb2.QueueStatus:
        """Who waits, and who was refused, for whatever reason."""
        return self.gate.status(self.refused.total())

    async def drain(self) -> None:
        """Turn new requests away and wait for the last one to end."""
        self._draining = True
        await self._idle.wait()

    async def _prepare(
        self, message: router_pb2.GenerateRequest, deadline: Deadline, place: QuotaHold
    ) -> Generation:
        received = time.monotonic()
        tenant = place.tenant
        async with _in_time(deadline, "make tokens of the prompt"):
            prompt = await self._prompts.of(message, tenant)
        info = await self.dispatcher.info(deadline)
        check_length(message, info.max_model_len)
        request = build(message, prompt, info, deadline, tenant)
        namespace = namespace_of(info, tenant)
        self.dispatcher.check_fits(request)
        place.charge(request.tokens)
        return Generation(
            request,
            self.dispatcher.prefix(request, namespace),
            namespace.digest if tenant.salt else info.namespace.digest,
            self.dispatcher,
            self._tokenizer,
            self._config,
            received,
        )

    async def _replay(self, generation: Generation, deadline: Deadline, tenant: Tenant) -> None:
        """Work of milliseconds: for those whose turn it is, not for all that come."""
        ending = sampling_of(generation.sampling, self._eos).ending_token_ids
        if generation.so_far > MANY_TOKENS:
            async with _in_time(deadline, "make text of the output so far"):
                await self._prompts.turns.beside(tenant, lambda: generation.replay(ending))
        else:
            generation.replay(ending)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        ended = "cancelled"
        try:
            yield
            ended = "finished"
        except KvrelayError as error:
            ended = code_of(error).name.lower()
            raise
        except Exception:
            ended = "internal"
            raise
        finally:
            self.ended[ended] += 1

    @contextmanager
    def _begun(
        self, request: router_pb2.GenerateRequest, deadline: Deadline, tenant: Tenant
    ) -> Iterator[QuotaHold]:
        check_envelope(request, self._model)
        deadline.check("to begin")
        with self.quotas.place(tenant) as place, self._admitted(tenant):
            yield place

    @contextmanager
    def _admitted(self, tenant: Tenant) -> Iterator[None]:
        if self._draining:
            raise Unavailable("this router is draining: ask another one")
        if self._open >= self._config.max_requests:
            self.gate.make_room(tenant, self._prompts.turns, self._open)
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()


@asynccontextmanager
async def _in_time(deadline: Deadline, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(deadline.remaining()):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"no time left to {what}") from None
