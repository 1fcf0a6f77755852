"""Which workers died. Pure: a request that left a silent worker learns here how it ended.

A worker is presumed dead once its connection breaks or is refused, or another boot token answers at
its address. An answer under its own token disproves it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_DEATHS = 1024  # remembered; the oldest is dropped


@dataclass(frozen=True, slots=True)
class Death:
    """``found_at``: when it was noticed. ``answered``: when the last answered check began."""

    found_at: float
    answered: float


class Deaths:
    """The last ``MAX_DEATHS`` deaths, by boot token, in order of time."""

    def __init__(self) -> None:
        self._deaths: dict[str, Death] = {}

    def note(self, key: str, answered: float, now: float) -> None:
        """A worker was found dead; finding it again changes nothing."""
        self._deaths.setdefault(key, Death(now, answered))
        while len(self._deaths) > MAX_DEATHS:
            del self._deaths[next(iter(self._deaths))]

    def disprove(self, key: str) -> None:
        """The worker answered: only its connection was lost."""
        self._deaths.pop(key, None)

    @property
    def found(self) -> dict[str, float]:
        """When each worker was found dead."""
        return {key: death.found_at for key, death in self._deaths.items()}

    @property
    def answered(self) -> dict[str, float]:
        """When the last check began that each dead worker answered."""
        return {key: death.answered for key, death in self._deaths.items()}
