"""One worker process of either role: the model, the engine, the connector, the open legs."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from kvrelay.block.mac import BlockKey
from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.connector.context import ConnectorOptions
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import MockConnector
from kvrelay.connector.none import NoConnector
from kvrelay.connector.script import PREFIX, read_script
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Connector
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.updates import Admitted, Ended
from kvrelay.engine.engine import Engine, EngineOptions
from kvrelay.engine.model.loading import LoadedModel, load_model
from kvrelay.engine.numerics import numeric_profile
from kvrelay.engine.runner import Runner
from kvrelay.errors import Mismatch
from kvrelay.process.cores import available_cores, model_threads
from kvrelay.process.memory import host_memory
from kvrelay.rpc.protocol import PROTOCOL, Role
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.policy import installed
from kvrelay.text.structured import TokenGrammar
from kvrelay.v1 import types_pb2, worker_pb2
from kvrelay.version import VERSION
from kvrelay.worker import convert, journal_file
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.grammars import LegGrammars
from kvrelay.worker.handoff import check_signature, check_tokens, sign
from kvrelay.worker.metrics import WorkerHistograms
from kvrelay.worker.roles import WorkerIdentity
from kvrelay.worker.stop_strings import StopCheckers
from kvrelay.worker.streams import LegStreams, LegUpdates
from kvstore.client.connect import connect
from kvstore.urls import public_urls

log = logging.getLogger(__name__)
TENANTS = 1024
UNKNOWN_MEMORY = 1 << 30
LAYOUT = "block,head,layer,k|v,position,dim"


@dataclass(frozen=True, slots=True)
class Worker:
    """Everything one worker process holds."""

    config: WorkerConfig
    identity: WorkerIdentity
    model: LoadedModel
    runner: Runner
    numeric_profile: str
    namespace: Namespace
    namer: Namer
    limits: EngineLimits
    connector: Connector
    engine: Engine
    streams: LegStreams
    stop_checkers: StopCheckers
    grammars: LegGrammars
    histograms: WorkerHistograms
    credentials: Credentials = field(default_factory=Credentials)

    @classmethod
    def build(cls, config: WorkerConfig, role: Role) -> Worker:
        """Load the model and build the parts; nothing runs yet. ``Unservable``, ``Rejected``."""
        attention = config.attention_backend
        model = load_model(
            config.model, config.dtype, config.device, config.max_model_len, attention
        )
        info = model.info
        credentials = installed().credentials
        threads = config.threads or model_threads(model.weight_bytes, available_cores())
        profile = numeric_profile(model, attention, threads)
        namespace = Namespace(
            model=config.served_model or info.name,
            revision=info.revision,
            dtype=info.dtype,
            layout=LAYOUT,
            block_size=config.block_size,
            numerics=profile if config.numerics == "strict" else "",
            fleet_key_id=credentials.fleet_key_id,
        )
        limits = limits_of(config, model)
        stop_checkers = StopCheckers(config.model)
        runner = open_runner(model, limits, attention, threads)
        namer = Namer(namespace)
        streams = LegStreams()
        key = BlockKey.of(credentials.fleet_key)
        connector = open_connector(config.store, runner, namespace, namer, key)
        histograms = WorkerHistograms()
        engine = Engine(
            runner,
            limits,
            naming_of(namer),
            connector,
            streams.deliver,
            EngineOptions(
                max_waiting=config.max_waiting,
                audit_steps=config.audit,
                step_seconds=config.step_seconds,
                on_fatal=lambda: os._exit(os.EX_SOFTWARE),
                journal=None if config.journal is None else journal_file.writer(config.journal),
                on_step=histograms.step,
            ),
        )
        return cls(
            config=config,
            identity=WorkerIdentity(role),
            model=model,
            runner=runner,
            numeric_profile=profile,
            namespace=namespace,
            namer=namer,
            limits=limits,
            connector=connector,
            engine=engine,
            streams=streams,
            stop_checkers=stop_checkers,
            grammars=LegGrammars(stop_checkers.tokenizer, info.eos_token_ids),
            histograms=histograms,
            credentials=credentials,
        )

    def start(self) -> None:
        """Start the engine; called on the event loop that the updates go to."""
        self.streams.attach()
        self.engine.start()

    def run(
        self, role: Role, leg: types_pb2.Leg, handoff: types_pb2.Handoff | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
        """Check a leg of this role and submit it; see ``LegStreams.run``."""
        return self._run(role, leg, handoff)

    @asynccontextmanager
    async def _run(
        self, role: Role, leg: types_pb2.Leg, handoff: types_pb2.Handoff | None
    ) -> AsyncGenerator[AsyncGenerator[LegUpdates]]:
        grammar = await self.grammars.of(leg)
        async with self._submitted(role, leg, handoff, grammar) as batches:
            yield batches

    def _submitted(
        self,
        role: Role,
        leg: types_pb2.Leg,
        handoff: types_pb2.Handoff | None,
        grammar: TokenGrammar | None,
    ) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
        """Does not wait: what it checks still holds when the leg is submitted."""
        if role != self.identity.role:
            raise Mismatch("role", f"this is a {self.identity.name} worker now")
        convert.check_leg(leg, self.model.info.vocab_size, self.limits.max_model_len)
        space = self._space(leg)
        if handoff is not None:
            self._check_handoff(leg, handoff)
        sampling = convert.sampling(leg.sampling, self.model.info.eos_token_ids)
        sampling.check(self.model.info.vocab_size)
        engine_id = self.streams.new_id(leg.request_id)
        prefill_only = role == types_pb2.ROLE_PREFILL
        save = self.config.store is not None
        order = convert.order(leg, engine_id, sampling, prefill_only, save, space)
        stop_checker = self.stop_checkers.of(order, sampling)
        return self.streams.run(self.engine, order, sampling, stop_checker, grammar)

    def handoff(self, leg: types_pb2.Leg, ended: Ended) -> types_pb2.Handoff:
        """The signed handoff of a prefill leg to the decode leg."""
        space = self.namer.within(leg.tenant_salt).namespace
        return sign(self.credentials.fleet_key, leg, space, ended.saved, ended.last_name or b"")

    def _check_handoff(self, leg: types_pb2.Leg, handoff: types_pb2.Handoff) -> None:
        namer = self.namer.within(leg.tenant_salt)
        check_signature(self.credentials.fleet_key, leg, namer.namespace, handoff)
        tokens = (*leg.prompt_token_ids, *leg.output_token_ids)
        check_tokens(namer, self.limits.block_size, tokens, handoff)

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
            namespace=namespace_message(self.namespace),
            attention_backend=self.runner.attention_profile,
            device=self.model.info.device,
            store=public_urls(self.config.store or ""),
            num_blocks=self.limits.num_blocks,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            vocab_size=self.model.info.vocab_size,
            pid=os.getpid(),
            version=VERSION,
            fleet_key_id=self.credentials.fleet_key_id,
            numeric_profile=self.numeric_profile,
        )

    def _space(self, leg: types_pb2.Leg) -> bytes:
        """The salt of the leg's tenant, if the leg is for this worker's namespace."""
        digest = self.namer.within(leg.tenant_salt).namespace
        if leg.namespace_digest and leg.namespace_digest != digest:
            raise Mismatch(
                "leg.namespace_digest",
                "the sender expects another model, dtype, block size or numeric profile than this"
                " worker has",
            )
        return leg.tenant_salt


def open_runner(
    model: LoadedModel, limits: EngineLimits, attention_backend: str, threads: int
) -> Runner:
    """The runner of a worker; logs why its attention is not the best one, if it is not."""
    runner = Runner(model, limits.num_blocks, limits.block_size, attention_backend, threads)
    if runner.attention_reason:
        log.warning("attention is %s: %s", runner.attention_profile, runner.attention_reason)
    return runner


def open_connector(
    url: str | None,
    runner: Runner,
    namespace: Namespace,
    namer: Namer,
    key: BlockKey | None = None,
) -> Connector:
    """External KV at ``url``: none, a store, or a script that distorts one (``mock:FILE``).

    Blocks are signed with ``key``, and others are not accepted.
    """
    if url is None:
        return NoConnector()
    if not url.startswith(PREFIX):
        options = ConnectorOptions(key=key)
        return StoreConnector(connect(url), namer, namespace, runner.pool, options)
    mock = read_script(url)
    return MockConnector(mock.script, open_connector(mock.store, runner, namespace, namer, key))


def counters_of(connector: Connector) -> Callable[[], ConnectorCounters] | None:
    """Reads the counters of the store connector; ``None`` without one."""
    if isinstance(connector, MockConnector) and connector.inner is not None:
        return counters_of(connector.inner)
    return (lambda: connector.counters) if isinstance(connector, StoreConnector) else None


def naming_of(namer: Namer) -> Naming:
    """The engine's block names: of this worker's namespace, and of recent tenants' namespaces."""

    @lru_cache(maxsize=TENANTS)
    def within(space: bytes) -> Naming:
        tenant = namer.within(space)
        return Naming(tenant.root, tenant.child)

    return Naming(namer.root, namer.child, within)


def limits_of(config: WorkerConfig, model: LoadedModel) -> EngineLimits:
    """The bounds of this worker; by default as many blocks as memory holds and requests can use."""
    size, length = config.block_size, model.info.max_model_len
    blocks = config.num_blocks
    if blocks is None:
        block_bytes = model.pool_shape(1, size).block_bytes
        useful = -(length // -size) * config.max_num_seqs
        memory = config.kv_memory or int(config.kv_share * free_memory(model.device))
        blocks = max(min(memory // block_bytes, useful), 1)
    if blocks * size < length:
        log.warning(
            "the KV pool holds %d positions, fewer than one request may have (max_model_len %d):"
            " longer requests are refused; raise --kv-memory or --num-blocks, or lower"
            " --max-model-len",
            blocks * size,
            length,
        )
    return EngineLimits(
        num_blocks=blocks,
        block_size=size,
        max_model_len=length,
        # Every running request gets a position in each step, so that none waits behind others.
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free now, on a GPU or on this host; ``UNKNOWN_MEMORY`` if it is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = host_memory()
    return UNKNOWN_MEMORY if memory is None else memory.free


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
