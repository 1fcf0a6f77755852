"""The input and output of the model runner in one step, and the updates of a leg's stream.

Frozen values. The updates of a leg come in order; ``Ended`` or ``Failed`` is the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.core.request import Admission, Finish
from kvrelay.engine.core.usage import LegTokens
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling
from kvrelay.usage import MissedBlocks


@dataclass(frozen=True, slots=True)
class Work:
    """Compute positions ``[start, start + count)`` of one sequence.

    ``tokens`` are all token ids of the sequence (prompt, then output) and ``blocks`` its block
    table, covering ``start + count`` positions at least; both are live lists of the scheduler,
    read during the step and never kept. The KV of ``[0, start)`` is valid in the table's blocks.
    With ``sampling``, sample the token at position ``start + count``; for penalties and
    ``min_tokens`` the output begins at ``prompt_len``.
    """

    tokens: Sequence[int]
    start: int
    count: int
    blocks: Sequence[int]
    prompt_len: int
    sampling: Sampling | None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability, before temperature and filters."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token and, if requested, its log probability and the most likely tokens."""

    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: ``queue`` until admitted, ``load`` until running, ``run`` to the first token."""

    queue: float
    load: float
    run: float


@dataclass(frozen=True, slots=True)
class Token:
    """One more token; ``finish`` marks the last one and says why.

    The first token carries the admission of the leg, so that a worker that dies later has already
    reported it.
    """

    sampled: Sampled
    finish: Finish | None
    admission: Admission | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has left the engine, after its last token; a prefill leg after its last save.

    ``saved`` leading tokens are in the store, as far as this leg knows; ``last_name`` is the name
    of the last block among them, ``None`` without any. ``sources`` are the leg's external tokens by
    the store they came from.
    """

    tokens: LegTokens
    timing: Timing
    preemptions: int
    saved: int
    last_name: bytes | None
    sources: Mapping[str, int] = field(default_factory=dict)
    missed: MissedBlocks | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has left the engine with an error."""

    error: KvrelayError


Update = Token | Ended | Failed
