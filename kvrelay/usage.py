"""The account of an answer: what each worker found, loaded and computed (docs/accounting.md).

Plain values without protobuf, under the field names of ``protos/kvrelay/v1/types.proto``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Miss(StrEnum):
    """Why a block was not loaded from the store; in usages, and a label of metrics.

    The first missing block gives the reason for all blocks after it, which cannot be used.
    """

    NEVER_STORED = "never_stored"  # since the store's start, as far back as it remembers
    EVICTED = "evicted"  # another block needed the room
    EXPIRED = "expired"  # the lease of a partial block ran out
    CLEARED = "cleared"  # an operator cleared the store
    OTHER_NAMESPACE = "other_namespace"  # stored for another model, dtype or layout
    OTHER_NUMERICS = "other_numerics"  # stored by workers of another numeric profile
    FAILED_VERIFICATION = "failed_verification"  # the loaded bytes were not the block's
    TOO_LATE = "too_late"  # stored or being stored, but not loaded in time
    UNREACHABLE = "unreachable"  # the store did not answer
    UNKNOWN = "unknown"  # the store cannot tell, for example after its restart


@dataclass(frozen=True, slots=True)
class MissedBlocks:
    """Blocks that a leg looked for in the store and did not get, and why the first was missing."""

    reason: Miss
    blocks: int


@dataclass(frozen=True, slots=True)
class StoreTokens:
    """Tokens loaded from one store; ``store`` is its URL without user, password and parameters."""

    store: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LegAdmission:
    """How one residency of a leg began: ``length = local + external + fresh``.

    ``frontier`` counts the positions with valid KV when the residency ended.
    """

    epoch: int
    length: int
    local: int
    external: int
    fresh: int
    frontier: int


@dataclass(frozen=True, slots=True)
class LegUsage:
    """The account of one leg: what the request did on one worker.

    ``length = local + external + computed``: the tokens the leg started from were found in the
    worker's own pool, loaded from the store, or computed. ``recomputed`` positions were computed
    again after preemptions; ``failed`` tokens were promised by the store and not delivered.
    ``saved`` counts the leading tokens in the store at the end of the leg, ``None`` if the worker
    did not report it. A ``lost`` leg's worker died: its figures are those of its admission, and
    ``generated`` and ``executed`` as far as its tokens show. ``sample`` is the index of the sample
    that the leg made. ``admission_unknown``: the leg was lost before its admission reached the
    router, so its figures are not 0 but absent.
    """

    worker_id: str
    address: str
    role: str  # "prefill" or "decode"
    length: int
    local: int
    external: int
    computed: int
    recomputed: int
    generated: int
    failed: int
    preemptions: int
    executed: int
    admissions: tuple[LegAdmission, ...]
    queue_seconds: float
    load_seconds: float
    run_seconds: float
    saved: int | None
    external_by_store: tuple[StoreTokens, ...]
    missed: tuple[MissedBlocks, ...]
    lost: bool
    sample: int = 0
    admission_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The account of a whole answer; ``legs`` are in order of time.

    ``cached_prompt_tokens`` is the first leg's hit: a transfer between legs is no cache hit. It is
    ``None`` if that is not known: the leg was lost before its admission reached the router.
    ``queue_seconds`` are those in the router's queue and in the first worker's.
    ``first_token_seconds`` runs in the router, from the request to the first token sent.
    ``recomputed`` is the number of executed positions less that of distinct ones, over all legs: 0
    if nothing was preempted or lost.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int | None
    legs: tuple[LegUsage, ...]
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    first_token_seconds: float
    recomputed: int
