"""The input and output of the model runner in one step, and the updates of a leg's stream.

Frozen values. ``Admitted`` is the first update of a leg that computes anything; ``Ended``
or ``Failed`` is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, Self

from kvrelay.engine.core.request import Admission, Finish
from kvrelay.engine.core.usage import LegTokens
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling
from kvrelay.usage import MissedBlocks


class OutputGrammar(Protocol):
    """Restricts one output; its state follows from the output tokens."""

    def follow(self, tokens: Sequence[int], first: int, last: int) -> None:
        """Consume what is new of the output ``tokens[first:last]``.

        Raises ``KvrelayError`` if it cannot continue.
        """

    @classmethod
    def masks(
        cls, grammars: Sequence[Self], threads: int
    ) -> tuple[bytes | bytearray, Sequence[KvrelayError | None]]:
        """The tokens that may follow each output, for grammars of one vocabulary.

        Returns rows of equal size, a bit for each token, lowest first; and for each row why it has
        no mask, or ``None``.
        """


@dataclass(frozen=True, slots=True)
class Work:
    """Compute positions ``[start, start + count)`` of one sequence.

    ``tokens`` are all token ids of the sequence (prompt, then output) and ``blocks`` its block
    table, covering ``start + count`` positions at least; both are live lists of the scheduler,
    read in the step or the one before, and not kept longer. The KV of ``[0, start)`` is valid in
    the table's blocks. With ``sampling``, sample the token at position ``start + count``; for
    penalties and ``min_tokens`` the output begins at ``prompt_len``. That token follows from
    ``grammar``, if any.
    """

    tokens: Sequence[int]
    start: int
    count: int
    blocks: Sequence[int]
    prompt_len: int
    sampling: Sampling | None
    grammar: OutputGrammar | None = None


Foresee = Callable[[], Sequence[Work]]
"""Plans the next step while a device computes this one: works that it will have, as far as known.

Their lists are then as they are now. Works of requests that end before are left out.
"""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability, before temperature and filters."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled token and, if requested, its log probability and the most likely tokens.

    With ``error`` no token was possible: ``token`` stands for none, and the request must end.
    """

    token: int
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
    error: KvrelayError | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: ``queue`` until admitted, ``load`` until running, ``run`` to the first token.

    Moments of the engine's clock: ``submitted``, and begin and end of the store ``lookup``, which
    is ``None`` if the engine did not wait for one.
    """

    queue: float
    load: float
    run: float
    submitted: float
    lookup: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The leg's first admission, delivered before the step that computes its first positions.

    Its external tokens are loaded and verified; ``sources`` are these tokens by store. A worker
    that dies later has so reported which tokens the leg did not have to compute.
    """

    admission: Admission
    sources: Mapping[str, int] = field(default_factory=dict)
    missed: MissedBlocks | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One more token; ``finish`` marks the last one and says why."""

    sampled: Sampled
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has left the engine, after its last token; a prefill leg after its last save.

    ``saved`` leading tokens are in the store, as far as this leg knows; ``last_name`` is the name
    of the last block among them, ``None`` without any. ``sources`` and ``missed`` are those of
    ``Admitted``.
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


Update = Admitted | Token | Ended | Failed


class LegTrace(Protocol):
    """The spans of a leg that is traced."""

    def calling(self) -> AbstractContextManager[None]:
        """Calls to the store inside belong to the leg."""

    def dropped(self, account: Ended, now: float) -> None:
        """The leg left without ``Ended``; a phase of its account that had not ended ends now."""
