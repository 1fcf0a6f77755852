"""Moments of a request at which a process gets its signal, seen in workers' loads and the client's
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.failures.proxy import Faults
from tests.failures.rig import SEQS, Rig, Seen

SLOW = 60_000.0  # bytes a second: a prompt's blocks take seconds
NEW_TOKENS = 96
LONG = 300
PROMPT = 400
PREFILLED = 64


@dataclass(frozen=True, slots=True)
class Scene:
    """An observation: workers' loads, what they had executed before, tokens at the client."""

    loads: Sequence[Seen]
    before: dict[tuple[str, int], int]
    tokens: int

    def busy(self, role: str, counts: Callable[[Seen], int]) -> int | None:
        """The worker of a role with the most of something, ``None`` if none has any."""
        ranked = [(counts(seen), -seen.index) for seen in self.loads if seen.role == role]
        most, index = max(ranked, default=(0, 0))
        return -index if most > 0 else None

    def executed(self, seen: Seen) -> int:
        """Positions computed since the scene began."""
        return seen.load.executed - self.before.get((seen.role, seen.index), 0)


@dataclass(frozen=True, slots=True)
class Moment:
    """``reached`` returns the index of the worker to signal, ``None`` before the moment."""

    name: str
    reached: Callable[[Scene, str], int | None]
    streams: int = 2
    prepare: Callable[[Rig, str], None] = lambda rig, role: None
    max_tokens: int = NEW_TOKENS
    prompt: int = PROMPT


def _serving(scene: Scene, role: str) -> int:
    """The worker that runs the request, or ran it last, else the first."""
    busy = scene.busy(role, lambda seen: seen.load.running + seen.load.loading)
    lately = scene.busy(role, scene.executed)
    return busy if busy is not None else lately or 0


def _at_tokens(count: int) -> Callable[[Scene, str], int | None]:
    def reached(scene: Scene, role: str) -> int | None:
        return _serving(scene, role) if scene.tokens >= count else None

    return reached


def _prefilling(scene: Scene, role: str) -> int | None:
    far = scene.busy(
        "prefill",
        lambda seen: seen.load.running if scene.executed(seen) >= PREFILLED else 0,
    )
    return None if far is None else far if role == "prefill" else 0


def _slow_loads(rig: Rig, role: str) -> None:
    rig.proxies[role].down.faults = Faults(rate=SLOW)


def _slow_saves(rig: Rig, role: str) -> None:
    rig.proxies[role].up.faults = Faults(rate=SLOW)


BEFORE = Moment("before the call", lambda scene, role: 0)
QUEUED = Moment(
    "queued",
    lambda scene, role: scene.busy(role, lambda seen: seen.load.waiting),
    streams=4 * SEQS,
    max_tokens=48,
)
LOADING = Moment(
    "during a load",
    lambda scene, role: scene.busy(role, lambda seen: seen.load.loading),
    prepare=_slow_loads,
)
PREFILLING = Moment("in the middle of prefill", _prefilling, prompt=2 * PROMPT)
FIRST = Moment("after the first token", _at_tokens(1))
MIDDLE = Moment("in the middle of the stream", _at_tokens(LONG // 5), max_tokens=LONG)
SAVING = Moment(
    "during a save",
    lambda scene, role: scene.busy(role, lambda seen: seen.load.saving),
    prepare=_slow_saves,
)
LAST = Moment("at the last token", _at_tokens(NEW_TOKENS - 8))  # the signal takes a few
MOMENTS = (BEFORE, QUEUED, LOADING, PREFILLING, FIRST, MIDDLE, SAVING, LAST)
