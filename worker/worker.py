"""One worker: a model, its engine, and what it says about itself. Both roles are made of it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from common.errors import Mismatch, Rejected
from connector.counters import Counters
from connector.mock import MockConnector
from connector.none import NoConnector
from connector.store import StoreConnector
from engine.engine import Engine
from engine.external import Connector
from engine.model import LoadedModel, load_model
from engine.plan import Limits
from engine.request import Naming
from engine.runner import Runner
from engine.updates import Ended
from kvblock.name import Namer
from kvblock.namespace import Namespace
from kvstore.connect import connect
from kvstore.urls import public_names
from protos import types_pb2, worker_pb2
from rpc.protocol import PROTOCOL
from worker import convert
from worker.config import WorkerConfig
from worker.identity import Identity, Role
from worker.stop_text import StopTexts
from worker.streams import Batch, Streams

VERSION = "0.1.0"
LAYOUT = "block,layer,k|v,position,head,dim"


@dataclass(frozen=True, slots=True)
class Handoff:
    """What another worker says it saved: so many leading tokens, and the last block's name."""

    tokens: int
    last_name: bytes


@dataclass(frozen=True, slots=True)
class Worker:
    """Everything one worker process holds."""

    config: WorkerConfig
    identity: Identity
    model: LoadedModel
    runner: Runner
    namespace: Namespace
    namer: Namer
    limits: Limits
    connector: Connector
    engine: Engine
    streams: Streams
    stop_texts: StopTexts

    @classmethod
    def build(cls, config: WorkerConfig, role: Role) -> Worker:
        """Load the model, make the rest; nothing runs yet. ``Unservable``, ``Rejected``."""
        model = load_model(config.model, config.dtype, config.device, config.max_model_len)
        info = model.info
        namespace = Namespace(info.name, info.revision, info.dtype, LAYOUT, config.block_size)
        limits = limits_of(config, model)
        runner = Runner(
            model, limits.num_blocks, limits.block_size, config.attention_backend, config.threads
        )
        namer, streams = Namer(namespace), Streams()
        outside = connector(config, runner, namespace, namer)
        engine = Engine(
            runner,
            limits,
            Naming(namer.root, namer.child),
            outside,
            streams.deliver,
            config.max_waiting,
            config.audit,
            lambda: os._exit(os.EX_SOFTWARE),
            journal_of(config),
        )
        return cls(
            config, Identity(role), model, runner, namespace, namer, limits, outside, engine,
            streams, StopTexts(config.model),
        )  # fmt: skip

    @property
    def store_counters(self) -> Callable[[], Counters] | None:
        """Reads what the store connector counts; ``None`` without one."""
        outside = self.connector
        if isinstance(outside, MockConnector) and outside.inner is not None:
            outside = outside.inner
        return (lambda: outside.counters) if isinstance(outside, StoreConnector) else None

    def start(self) -> None:
        """Serve legs; called on the event loop that gets the updates."""
        self.streams.attach()
        self.engine.start()

    def run(
        self, role: Role, leg: types_pb2.Leg, handoff: Handoff | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[Batch]]:
        """Check a leg for a worker of that role and submit it; see ``Streams.run``."""
        if role != self.identity.role:
            raise Mismatch("role", f"this is a {self.identity.name} worker now")
        self._check(leg)
        if handoff is not None:
            self._check_handoff(leg, handoff)
        rules = convert.sampling(leg.sampling, self.model.info.eos_token_ids)
        rules.check(self.model.info.vocab_size)
        engine_id, save = self.streams.new_id(leg.request_id), self.config.store is not None
        order = convert.order(leg, engine_id, rules, role == types_pb2.ROLE_PREFILL, save)
        return self.streams.run(self.engine, order, rules, self.stop_texts.of(order, rules))

    def _check_handoff(self, leg: types_pb2.Leg, handoff: Handoff) -> None:
        """Compare a handoff's last name, which commits to all before it, with our own."""
        tokens = handoff.tokens
        if not tokens:
            return
        size = self.limits.block_size
        covered = (*leg.prompt_token_ids, *leg.output_token_ids)[:tokens]
        if len(covered) < tokens:
            raise Rejected("handoff_tokens", f"{tokens} of a leg of {len(covered)} tokens")
        names = self.namer.chain(covered, size)
        name = names[-1] if names else self.namer.root
        if rest := covered[len(names) * size :]:
            name = self.namer.child(name, rest)
        if name != handoff.last_name:
            raise Mismatch("handoff_last_name", "these blocks were not computed from these tokens")

    def usage(self, ended: Ended, leg: types_pb2.Leg) -> types_pb2.LegUsage:
        """The account of one leg, signed with who did it; explained if it asked for that."""
        return convert.leg_usage(ended, self.identity.boot, self.identity.role, leg.explain)

    def info(self) -> worker_pb2.WorkerInfo:
        """What ``GetInfo`` answers."""
        return worker_pb2.WorkerInfo(
            worker=self.identity.boot,
            role=self.identity.role,
            started_as=self.identity.started_as,
            protocol=PROTOCOL,
            namespace=namespace_message(self.namespace),
            attention_backend=self.runner.attention_backend,
            device=self.model.info.device,
            store=public_names(self.config.store or ""),
            num_blocks=self.limits.num_blocks,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            vocab_size=self.model.info.vocab_size,
            pid=os.getpid(),
            version=VERSION,
        )

    def _check(self, leg: types_pb2.Leg) -> None:
        convert.check_leg(leg, self.model.info.vocab_size)
        if leg.namespace_digest and leg.namespace_digest != self.namespace.digest:
            raise Mismatch(
                "leg.namespace_digest",
                "the sender expects another model, dtype or block size than this worker has",
            )


def limits_of(config: WorkerConfig, model: LoadedModel) -> Limits:
    """The bounds of this worker. Without a number of blocks: what memory and requests can use."""
    size, length = config.block_size, model.info.max_model_len
    blocks = config.num_blocks
    if blocks is None:
        block_bytes = model.pool_shape(1, size).block_rows * model.pool_shape(1, size).row_bytes
        useful = -(length // -size) * config.max_num_seqs
        blocks = max(min(config.kv_memory // block_bytes, useful), 1)
    return Limits(
        num_blocks=blocks,
        block_size=size,
        max_model_len=length,
        # Every running request gets its position in a step, so that none waits behind others.
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def journal_of(config: WorkerConfig) -> Callable[[str], object] | None:
    """Where the journal's lines go; the file is as private as the prompts in it."""
    if config.journal is None:
        return None
    try:
        descriptor = os.open(config.journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise Rejected("journal", f"cannot write {config.journal}: {error.strerror}") from error
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8").write


def connector(
    config: WorkerConfig, runner: Runner, namespace: Namespace, namer: Namer
) -> Connector:
    """External KV as the configuration says."""
    if config.store is None:
        return NoConnector()
    return StoreConnector(connect(config.store), namer, namespace, runner.pool)


def namespace_message(namespace: Namespace) -> worker_pb2.Namespace:
    """A namespace on the wire; the tenant's salt is in the digest and nowhere else."""
    return worker_pb2.Namespace(
        model=namespace.model,
        revision=namespace.revision,
        dtype=namespace.dtype,
        layout=namespace.layout,
        block_size=namespace.block_size,
        format_version=namespace.format_version,
        digest=namespace.digest,
    )
