"""One worker process of either role: its engine, the open legs, what checks and converts them."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from kvrelay.block.namespace import Namespace
from kvrelay.engine.core.updates import Admitted, Ended
from kvrelay.engine.engine import Deliver, EngineOptions
from kvrelay.errors import Mismatch
from kvrelay.process import logs
from kvrelay.process.gpus import show_one
from kvrelay.rpc import tracing
from kvrelay.rpc.protocol import NAMES, PROTOCOL, Role
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.tracing import Headers
from kvrelay.text.structured import TokenGrammar
from kvrelay.v1 import types_pb2, worker_pb2
from kvrelay.version import VERSION
from kvrelay.worker import convert, journal_file
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.engines.opened import OpenedEngine, WorkerEngine
from kvrelay.worker.grammars import LegGrammars
from kvrelay.worker.handoff import check_signature, check_tokens, sign
from kvrelay.worker.metrics import WorkerHistograms
from kvrelay.worker.roles import WorkerIdentity
from kvrelay.worker.spans import LegSpans
from kvrelay.worker.stop_strings import StopCheckers
from kvrelay.worker.streams import LegStreams, LegUpdates
from kvstore.urls import public_urls


@dataclass(frozen=True, slots=True)
class Worker:
    """Everything one worker process holds."""

    config: WorkerConfig
    identity: WorkerIdentity
    opened: OpenedEngine
    streams: LegStreams
    stop_checkers: StopCheckers
    grammars: LegGrammars
    histograms: WorkerHistograms
    credentials: Credentials = field(default_factory=Credentials)

    @classmethod
    def build(cls, config: WorkerConfig, role: Role) -> Worker:
        """Open the engine; no leg runs yet. ``Unservable``, ``Rejected``."""
        credentials = installed().credentials
        stop_checkers = StopCheckers(config.model)
        streams = LegStreams()
        histograms = WorkerHistograms()
        options = EngineOptions(
            max_waiting=config.max_waiting,
            audit_steps=config.audit,
            step_seconds=config.step_seconds,
            on_fatal=lambda: os._exit(os.EX_SOFTWARE),
            journal=None if config.journal is None else journal_file.writer(config.journal),
            on_step=histograms.step,
        )
        opened = open_engine(config, credentials, streams.deliver, options)
        return cls(
            config=config,
            identity=WorkerIdentity(role),
            opened=opened,
            streams=streams,
            stop_checkers=stop_checkers,
            grammars=LegGrammars(stop_checkers.tokenizer, opened.model.eos_token_ids),
            histograms=histograms,
            credentials=credentials,
        )

    @property
    def engine(self) -> WorkerEngine:
        """Runs the legs."""
        return self.opened.engine

    def start(self) -> None:
        """Start the engine; called on the event loop that the updates go to."""
        self.streams.attach()
        self.engine.start()

    def run(
        self,
        role: Role,
        leg: types_pb2.Leg,
        handoff: types_pb2.Handoff | None = None,
        headers: Headers = (),
    ) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
        """Check a leg of this role and submit it; see ``LegStreams.run``."""
        return self._run(role, leg, handoff, headers)

    @asynccontextmanager
    async def _run(
        self,
        role: Role,
        leg: types_pb2.Leg,
        handoff: types_pb2.Handoff | None,
        headers: Headers,
    ) -> AsyncGenerator[AsyncGenerator[LegUpdates]]:
        logs.serves(leg.request_id)
        about = {"rpc.system.name": "grpc", "kvrelay.worker.id": self.identity.id}
        with tracing.serving(NAMES[role], headers, about) as span:
            grammar = await self.grammars.of(leg)
            spans = LegSpans(span, role) if span.on else None
            async with self._submitted(role, leg, handoff, grammar, spans) as batches:
                if spans is None:
                    yield batches
                    return
                async with aclosing(spans.watch(batches)) as watched:
                    yield watched

    def _submitted(
        self,
        role: Role,
        leg: types_pb2.Leg,
        handoff: types_pb2.Handoff | None,
        grammar: TokenGrammar | None,
        spans: LegSpans | None,
    ) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
        """Does not wait: what it checks still holds when the leg is submitted."""
        if role != self.identity.role:
            raise Mismatch("role", f"this is a {self.identity.name} worker now")
        convert.check_leg(leg, self.opened.model.vocab_size, self.opened.limits.max_model_len)
        space = self._space(leg)
        if handoff is not None:
            self._check_handoff(leg, handoff)
        sampling = convert.sampling(leg.sampling, self.opened.model.eos_token_ids)
        sampling.check(self.opened.model.vocab_size)
        engine_id = self.streams.new_id(leg.request_id)
        prefill_only = role == types_pb2.ROLE_PREFILL
        save = self.config.store is not None
        order = convert.order(leg, engine_id, sampling, prefill_only, save, space)
        stop_checker = self.stop_checkers.of(order, sampling)
        return self.streams.run(self.engine, order, sampling, stop_checker, grammar, spans)

    def handoff(self, leg: types_pb2.Leg, ended: Ended) -> types_pb2.Handoff:
        """The signed handoff of a prefill leg to the decode leg."""
        space = self.opened.namer.within(leg.tenant_salt).namespace
        return sign(self.credentials.fleet_key, leg, space, ended.saved, ended.last_name or b"")

    def _check_handoff(self, leg: types_pb2.Leg, handoff: types_pb2.Handoff) -> None:
        namer = self.opened.namer.within(leg.tenant_salt)
        check_signature(self.credentials.fleet_key, leg, namer.namespace, handoff)
        tokens = (*leg.prompt_token_ids, *leg.output_token_ids)
        check_tokens(namer, self.opened.limits.block_size, tokens, handoff)

    def admitted(self, admitted: Admitted, leg: types_pb2.Leg) -> types_pb2.LegUsage:
        """The account of one leg at its admission."""
        identity = self.identity
        return convert.admitted_usage(admitted, identity.id, identity.role, leg.explain)

    def usage(self, ended: Ended, leg: types_pb2.Leg) -> types_pb2.LegUsage:
        """The account of one leg; with the reasons of missed blocks if the leg asks to explain."""
        self.histograms.leg(ended)
        return convert.leg_usage(ended, self.identity.id, self.identity.role, leg.explain)

    def info(self) -> worker_pb2.WorkerInfo:
        """The answer to ``GetInfo``."""
        return worker_pb2.WorkerInfo(
            worker_id=self.identity.id,
            role=self.identity.role,
            started_as=self.identity.started_as,
            protocol=PROTOCOL,
            namespace=namespace_message(self.opened.namespace),
            attention_backend=self.opened.attention,
            device=self.opened.model.device,
            store=public_urls(self.config.store or ""),
            num_blocks=self.opened.limits.num_blocks,
            max_model_len=self.opened.limits.max_model_len,
            max_num_seqs=self.opened.limits.max_num_seqs,
            max_num_batched_tokens=self.opened.limits.max_num_batched_tokens,
            vocab_size=self.opened.model.vocab_size,
            pid=os.getpid(),
            version=VERSION,
            fleet_key_id=self.credentials.fleet_key_id,
            numeric_profile=self.opened.numeric_profile,
        )

    def _space(self, leg: types_pb2.Leg) -> bytes:
        """The salt of the leg's tenant, if the leg is for this worker's namespace."""
        digest = self.opened.namer.within(leg.tenant_salt).namespace
        if leg.namespace_digest and leg.namespace_digest != digest:
            raise Mismatch(
                "leg.namespace_digest",
                "the sender expects another model, dtype, block size or numeric profile than this"
                " worker has",
            )
        return leg.tenant_salt


def open_engine(
    config: WorkerConfig, credentials: Credentials, deliver: Deliver, options: EngineOptions
) -> OpenedEngine:
    """The engine that the configuration names; imports no other. ``Unservable``, ``Rejected``."""
    if config.engine == "vllm":
        from kvrelay.worker.engines.vllm import open_vllm

        return open_vllm(config, credentials, deliver, options)
    config = replace(config, device=show_one(config.device))
    from kvrelay.worker.engines.native import open_native

    return open_native(config, credentials, deliver, options)


def namespace_message(namespace: Namespace) -> worker_pb2.Namespace:
    """The message of a namespace; the tenant's salt is only in the digest."""
    return worker_pb2.Namespace(
        model=namespace.model,
        revision=namespace.revision,
        dtype=namespace.dtype,
        layout=namespace.layout,
        block_size=namespace.block_size,
        format_version=namespace.format_version,
        numerics=namespace.numerics,
        digest=namespace.digest,
    )
