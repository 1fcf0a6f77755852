"""Fake workers over real gRPC, and a router in front of them.

The fake model's next token is a digest of every token before it and the seed, so a gap, a repeat or
a lost seed anywhere changes everything after it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeAlias, TypeVar

import grpc

from kvrelay.errors import KvrelayError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import PROTOCOL
from kvrelay.rpc.server.server import Server, ServerOptions
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.config import RouterConfig
from router.http.server import HttpServer
from router.main import make_door, make_server
from router.service import RouterService
from router.workers.registry import Registry
from tests.text.kinds import write

Q = TypeVar("Q")
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Q, R]"

BLOCK = 4
VOCAB = 380
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


@cache
def model() -> Path:
    """A folder with a byte-level tokenizer."""
    folder = Path(mkdtemp(prefix="kvrelay-tests-")) / "tiny"
    folder.mkdir()
    return write("byte_level", folder)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(model())


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Never a special token."""
    digest = hashlib.sha256(repr((list(tokens), seed)).encode()).digest()
    return 2 + int.from_bytes(digest[:4], "little") % (VOCAB - 2)


def answer(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The output of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    return tokenizer().decode(tokens)


def namespace(**changes: str | int | bytes) -> worker_pb2.Namespace:
    values = {"model": "tiny", "revision": "r", "dtype": "float32", "layout": "l"}
    result = worker_pb2.Namespace(block_size=BLOCK, format_version=1, digest=b"d" * 32, **values)
    for name, value in changes.items():
        setattr(result, name, value)
    return result


class Garbage:
    """Serialized in place of a message."""


def serialised(message: Garbage | decode_pb2.DecodeResponse) -> bytes:
    return b"\xff\xff" if isinstance(message, Garbage) else message.SerializeToString()


@dataclass(slots=True)
class Behaviour:
    """How a fake worker differs from one that serves well."""

    die_after: int | None = None  # tokens of a leg, then the whole server stops
    dying: float = 0.0  # seconds for which it is silent before it stops
    fail: KvrelayError | None = None  # instead of the first token
    fail_after: int = 0  # tokens before `fail`
    step: asyncio.Semaphore | None = None  # one permit for each token
    garbage_after: int | None = None  # tokens of a leg, then bytes that are no message
    no_handoff: bool = False
    handoff_gate: asyncio.Event | None = None
    ignore_stops: bool = False
    checks: asyncio.Event | None = None  # answered while it is set
    tokens: asyncio.Event | None = None  # made while it is set
    draining: bool = False
    slow: float = 0.0  # seconds before a check is answered
    hits: int | None = None  # tokens that the leg did not have to compute, reported at admission
    pace: float | None = None  # seconds reported for each token computed, and 100 tokens fetched


@dataclass(slots=True)
class FakeWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    role: types_pb2.Role.ValueType
    boot: str
    namespace: worker_pb2.Namespace = field(default_factory=namespace)
    max_model_len: int = 1000
    numeric_profile: str = ""
    num_blocks: int = 100
    protocol: int = PROTOCOL
    max_num_seqs: int = 64
    started_as: types_pb2.Role.ValueType = types_pb2.ROLE_UNSPECIFIED
    behaviour: Behaviour = field(default_factory=Behaviour)
    legs: list[types_pb2.Leg] = field(default_factory=list)
    handoffs: list[tuple[int, bytes]] = field(default_factory=list)
    time_left: list[float | None] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    server: Server | None = None
    address: str = ""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self.server = server = Server(ServerOptions(address))
        server.add(
            "kvrelay.v1.WorkerService",
            lambda s: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, s),
        )
        if self.role == types_pb2.ROLE_PREFILL:
            server.add(
                "kvrelay.v1.PrefillService",
                lambda s: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, s),
            )
        else:
            server.add("kvrelay.v1.DecodeService", self._register_decode)
        self.address = await server.start()
        return self.address

    def _register_decode(self, server: grpc.aio.Server) -> None:
        """As generated code does, with a serializer that accepts garbage."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.Decode,
            request_deserializer=decode_pb2.DecodeRequest.FromString,
            response_serializer=serialised,
        )
        service = grpc.method_handlers_generic_handler(
            "kvrelay.v1.DecodeService", {"Decode": handler}
        )
        server.add_generic_rpc_handlers((service,))

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def _tokens(
        self, leg: types_pb2.Leg, most: int
    ) -> AsyncGenerator[tuple[types_pb2.Token, types_pb2.FinishReason.ValueType]]:
        does = self.behaviour
        self.legs.append(leg)
        self.entered.set()
        tokens = [*leg.prompt_token_ids, *leg.output_token_ids]
        text = OutputText(tokenizer(), leg.sampling.stop)
        text.replay(leg.output_token_ids)
        made = 0
        try:
            while True:
                if does.fail is not None and made >= does.fail_after:
                    raise does.fail
                if does.die_after is not None and made >= does.die_after:
                    await asyncio.shield(asyncio.ensure_future(self._die(does)))
                    await asyncio.sleep(30)
                if does.step is not None:
                    await does.step.acquire()
                if does.tokens is not None:
                    await does.tokens.wait()
                tokens.append(next_token(tokens, leg.sampling.seed))
                made += 1
                output = len(tokens) - len(leg.prompt_token_ids)
                finish = types_pb2.FINISH_REASON_UNSPECIFIED
                if (text.push(tokens[-1]).stopped and not does.ignore_stops) or tokens[
                    -1
                ] in leg.sampling.stop_token_ids:
                    finish = STOP
                elif output >= leg.max_tokens:
                    finish = LENGTH
                yield types_pb2.Token(id=tokens[-1]), finish
                if finish or made >= most:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def _die(self, does: Behaviour) -> None:
        """Be silent for a while if it is to be, then stop the server."""
        assert self.server is not None
        if does.dying:
            does.checks = asyncio.Event()
            await asyncio.sleep(does.dying)
        asyncio.get_running_loop().create_task(self.server.stop(0))

    def _admitted(self, leg: types_pb2.Leg, external: int) -> types_pb2.LegUsage:
        """The account of a leg at its admission."""
        length = len(leg.prompt_token_ids) + len(leg.output_token_ids)
        run = types_pb2.Admission(epoch=1, length=length, external=external)
        run.fresh = length - external
        return types_pb2.LegUsage(
            worker_id=self.boot,
            role=self.role,
            length=length,
            external=external,
            computed=length - external,
            admissions=[run],
            external_by_store=[types_pb2.StoreTokens(store="kvrelay://fake", tokens=external)],
        )

    def _usage(self, leg: types_pb2.Leg, made: int, external: int) -> types_pb2.LegUsage:
        length = len(leg.prompt_token_ids) + len(leg.output_token_ids)
        pace = self.behaviour.pace
        return types_pb2.LegUsage(
            worker_id=self.boot,
            role=self.role,
            length=length,
            external=external,
            computed=length - external,
            generated=made,
            saved=length,
            load_seconds=0.25 if pace is None else pace * external / 100,
            run_seconds=0.5 if pace is None else pace * (length - external),
            queue_seconds=0.125,
        )

    async def Prefill(
        self,
        request: prefill_pb2.PrefillRequest,
        context: Context[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse]:
        await context.send_initial_metadata(())  # as the real ones
        leg = request.leg
        self.time_left.append(context.time_remaining())
        hits = self.behaviour.hits
        if hits is not None:
            yield prefill_pb2.PrefillResponse(admitted=self._admitted(leg, hits))
        async for token, finish in self._tokens(leg, 1):
            yield prefill_pb2.PrefillResponse(
                first_token=prefill_pb2.FirstToken(token=token, finish_reason=finish)
            )
        if self.behaviour.handoff_gate is not None:
            await self.behaviour.handoff_gate.wait()
        if self.behaviour.no_handoff:
            return
        prompt = len(leg.prompt_token_ids)
        yield prefill_pb2.PrefillResponse(
            handoff=types_pb2.Handoff(saved_tokens=prompt, last_block_name=b"n" * 32),
            usage=self._usage(leg, 1, min(4, prompt - 1) if hits is None else hits),
        )

    async def Decode(
        self,
        request: decode_pb2.DecodeRequest,
        context: Context[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> AsyncGenerator[decode_pb2.DecodeResponse]:
        await context.send_initial_metadata(())  # as the real ones
        leg, made = request.leg, 0
        self.time_left.append(context.time_remaining())
        self.handoffs.append((request.handoff.saved_tokens, request.handoff.last_block_name))
        hits = self.behaviour.hits
        if hits is not None:
            yield decode_pb2.DecodeResponse(admitted=self._admitted(leg, hits))
        async for token, finish in self._tokens(leg, 1 << 30):
            if made == self.behaviour.garbage_after:
                yield Garbage()  # type: ignore[misc]
            made += 1
            yield decode_pb2.DecodeResponse(tokens=[token], finish_reason=finish)
        external = request.handoff.saved_tokens if hits is None else hits
        yield decode_pb2.DecodeResponse(usage=self._usage(leg, made, external))

    async def GetInfo(
        self,
        request: worker_pb2.GetInfoRequest,
        context: Context[worker_pb2.GetInfoRequest, worker_pb2.GetInfoResponse],
    ) -> worker_pb2.GetInfoResponse:
        info = worker_pb2.WorkerInfo(
            worker_id=self.boot,
            role=self.role,
            started_as=self.started_as or self.role,
            protocol=self.protocol,
            pid=1,
            namespace=self.namespace,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            store="kvrelay://fake",
            numeric_profile=self.numeric_profile or self.namespace.numerics,
        )
        return worker_pb2.GetInfoResponse(info=info)

    async def GetLoad(
        self,
        request: worker_pb2.GetLoadRequest,
        context: Context[worker_pb2.GetLoadRequest, worker_pb2.GetLoadResponse],
    ) -> worker_pb2.GetLoadResponse:
        await asyncio.sleep(self.behaviour.slow)
        if self.behaviour.checks is not None:
            await self.behaviour.checks.wait()
        load = worker_pb2.WorkerLoad(worker_id=self.boot, draining=self.behaviour.draining)
        return worker_pb2.GetLoadResponse(load=load)

    async def SetRole(
        self,
        request: worker_pb2.SetRoleRequest,
        context: Context[worker_pb2.SetRoleRequest, worker_pb2.SetRoleResponse],
    ) -> worker_pb2.SetRoleResponse:
        return worker_pb2.SetRoleResponse()

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: Context[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse()

    async def Audit(
        self,
        request: worker_pb2.AuditRequest,
        context: Context[worker_pb2.AuditRequest, worker_pb2.AuditResponse],
    ) -> worker_pb2.AuditResponse:
        return worker_pb2.AuditResponse()


def prefill_worker(boot: str = "p0", **changes: object) -> FakeWorker:
    return replace(FakeWorker(types_pb2.ROLE_PREFILL, boot), **changes)  # type: ignore[arg-type]


def decode_worker(boot: str = "d0", **changes: object) -> FakeWorker:
    return replace(FakeWorker(types_pb2.ROLE_DECODE, boot), **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Running:
    """A router in front of fake workers."""

    address: str
    channel: grpc.aio.Channel
    registry: Registry
    service: RouterService
    http: str = ""  # base URL of the HTTP door
    door: HttpServer | None = None

    def call(
        self, request: router_pb2.GenerateRequest, seconds: float = 20
    ) -> grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]:
        return router_pb2_grpc.RouterServiceStub(self.channel).Generate(request, timeout=seconds)

    async def generate(
        self, request: router_pb2.GenerateRequest, seconds: float = 20
    ) -> list[router_pb2.GenerateResponse]:
        return [response async for response in self.call(request, seconds)]

    async def settled(self, used: int, listed: int | None = None) -> None:
        """Wait until ``used`` workers are usable and all others were checked."""

        def done() -> bool:
            workers = self.registry.workers
            asked = all("not asked" not in str(worker.problem) for worker in workers)
            count = sum(worker.usable for worker in workers)
            return asked and count == used and (listed is None or len(workers) == listed)

        assert await self.registry.wait_for(done, Deadline.after(10)), self.registry.workers


@asynccontextmanager
async def running(
    workers: Sequence[FakeWorker], used: int | None = None, **changes: object
) -> AsyncIterator[Running]:
    """Start the workers and a router that knows them, wait until it uses ``used`` (all)."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            if not worker.address:
                await worker.start()
            stack.push_async_callback(worker.stop)
        settings: dict[str, object] = {
            "model": str(model()),
            "port": 0,
            "health_interval": 0.1,
            "health_timeout": 2.0,
            "disaggregate": "always",
            "worker_wait": 1.0,
            "prefill": tuple(w.address for w in workers if w.role == types_pb2.ROLE_PREFILL),
            "decode": tuple(w.address for w in workers if w.role == types_pb2.ROLE_DECODE),
        }
        config = RouterConfig(**{**settings, **changes})  # type: ignore[arg-type]
        registry = Registry(config)
        known = Tokenizer(config.model) if "model" in changes else tokenizer()
        service = RouterService(config, registry, known)
        server = make_server(config, service)
        address = await server.start()
        stack.push_async_callback(server.stop)
        await registry.start()
        stack.push_async_callback(registry.close)
        channel = await stack.enter_async_context(open_channel(address))
        url, door = "", None
        if config.http_port is not None:
            door = make_door(config, service, config.http_port)
            url = await door.start()
            stack.push_async_callback(door.stop)
        result = Running(address, channel, registry, service, url, door)
        await result.settled(len(workers) if used is None else used)
        yield result


def ids(responses: Sequence[router_pb2.GenerateResponse]) -> list[int]:
    return [token.id for response in responses for token in response.tokens]


def text(responses: Sequence[router_pb2.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)
