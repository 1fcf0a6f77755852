"""What the model runner is asked to do in one step, and what it answers. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """Compute positions ``[start, start + count)`` of one sequence.

    ``tokens`` are all token ids of the sequence (prompt, then output) and ``blocks`` its block
    table, covering ``start + count`` positions at least; both are live lists of the scheduler,
    read during the step and never kept. The KV of ``[0, start)`` is valid in the table's blocks.
    With ``sampling``, the token at position ``start + count`` is wanted; ``prompt_len`` tells the
    penalties and ``min_tokens`` where the output begins.
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
    """The token chosen and, when asked for, its log probability and the most likely ones."""

    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
