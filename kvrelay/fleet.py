"""What a router reports of its workers and its queue, as plain values without protobuf.

Under the field names of ``protos/kvrelay/v1/router.proto`` and ``worker.proto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

WorkerRole: TypeAlias = Literal["prefill", "decode"]
WorkerState: TypeAlias = Literal[
    "unknown", "starting", "ready", "draining", "suspect", "unreachable"
]


@dataclass(frozen=True, slots=True)
class WorkerNamespace:
    """The model of a worker and the format of its KV blocks."""

    model: str
    revision: str  # digest of the weights
    dtype: str
    layout: str
    block_size: int
    format_version: int
    numerics: str  # numeric profile; empty with --numerics loose


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports about itself at its start. ``store`` is a URL without credentials."""

    worker_id: str  # random, new at every start and change of role
    namespace: WorkerNamespace
    attention_backend: str
    device: str
    store: str
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    pid: int
    version: str
    numeric_profile: str  # whatever --numerics is


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker at the router's last check; zeros before the first.

    ``waiting``, ``loading`` and ``running`` count requests. ``free_blocks`` are neither held nor
    being saved. ``steps``, ``executed`` (positions) and ``preemptions`` count from its start.
    """

    waiting: int
    loading: int
    running: int
    free_blocks: int
    held_blocks: int
    saving: int
    waiting_tokens: int
    steps: int
    executed: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as its router sees it.

    ``healthy`` says whether the router uses it, and ``reason`` why not. ``in_flight`` counts the
    legs of this router on it. ``role`` and ``info`` are ``None`` until they are known.
    """

    address: str
    role: WorkerRole | None
    state: WorkerState
    healthy: bool
    reason: str
    in_flight: int
    info: WorkerInfo | None
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Requests of one router. ``refused`` counts those that found the queue full, from its start.

    ``slots`` is how many may run with the decode workers of now; ``tokens_per_second`` the rate at
    which the queue drains, 0 before it was measured.
    """

    running: int
    slots: int
    waiting: int
    waiting_tokens: int
    tokens_per_second: float
    refused: int


@dataclass(frozen=True, slots=True)
class RouterTotals:
    """Counts of one router since its start; the difference of two readings gives rates.

    ``prompt_tokens`` and ``cached_prompt_tokens`` (found in a worker's pool or in the store) are of
    complete answers. ``first_token_seconds`` is the sum over ``first_tokens`` requests.
    """

    generation_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    first_tokens: int
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The workers that a router knows, its queue and its counts."""

    workers: tuple[WorkerStatus, ...]
    queue: QueueStatus
    totals: RouterTotals
