"""What the engine tells about a request under way: frozen values, in order, the last one final."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.engine.core.request import Admission, Finish
from kvrelay.engine.core.usage import LegTokens
from kvrelay.engine.core.work import Sampled
from kvrelay.errors import KvrelayError
from kvrelay.usage import Miss


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: ``queue`` until admitted, ``load`` until running, ``run`` to the first token."""

    queue: float
    load: float
    run: float


@dataclass(frozen=True, slots=True)
class Token:
    """One more token; ``finish`` says that it is the last one, and why.

    The first one carries how the leg began: should the worker die, that is known all the same.
    """

    sampled: Sampled
    finish: Finish | None
    begun: Admission | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """So many blocks were looked for outside and not had; why the first of them was not."""

    reason: Miss
    blocks: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has left the engine, after its last token and, if it was to, its last save.

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
    missed: Missed | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has left the engine without an answer."""

    error: KvrelayError


Update = Token | Ended | Failed
