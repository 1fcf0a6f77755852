"""What the services of a worker know of its engine, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kvrelay.block.name import Namer
from kvrelay.block.namespace import LAYOUT, Namespace
from kvrelay.connector.counters import ConnectorCounters
from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.legs import StopChecker
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import LegTrace, OutputGrammar
from kvrelay.engine.engine import EngineLoad
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.sampling import Sampling
from kvrelay.worker.config import WorkerConfig


class WorkerEngine(Protocol):
    """The calls of the services. ``kvrelay.engine.engine.Engine`` documents them."""

    def start(self) -> None: ...
    def submit(
        self,
        order: Order,
        sampling: Sampling,
        stop_checker: StopChecker | None = None,
        grammar: OutputGrammar | None = None,
        trace: LegTrace | None = None,
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def load(self) -> EngineLoad: ...
    def audit(self) -> Future[list[Finding]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of a worker; ``revision`` is a digest of config and weights."""

    name: str
    revision: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    """An engine with its model loaded, not started yet.

    ``attention`` names how attention is computed, ``threads`` are those of the model.
    ``store_counters`` reads the counters of the store connector, ``None`` without one.
    """

    engine: WorkerEngine
    model: ServedModel
    limits: EngineLimits
    namespace: Namespace
    namer: Namer
    numeric_profile: str
    attention: str
    threads: str
    store_counters: Callable[[], ConnectorCounters] | None


def namespace_of(
    config: WorkerConfig,
    model: ServedModel,
    block_size: int,
    profile: str,
    credentials: Credentials,
) -> Namespace:
    """The namespace of a worker's blocks; its profile counts only with ``--numerics strict``."""
    return Namespace(
        model=config.served_model or model.name,
        revision=model.revision,
        dtype=model.dtype,
        layout=LAYOUT,
        block_size=block_size,
        numerics=profile if config.numerics == "strict" else "",
        fleet_key_id=credentials.fleet_key_id,
    )
