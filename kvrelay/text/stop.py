"""Stop strings over a stream of text: only a possible beginning of one is held back. Pure.

The match that is *complete* first wins (of two that end together, the longer), so the outcome does
not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text to ``push`` until it reports a complete stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """The text that can be sent now, and whether a stop string is complete.

        The text before the stop string is sent, the stop string and the text after it are not.
        While not ``armed``, a stop string that ends within ``text`` has no effect.
        """
        if not self._stops:
            return text, False
        whole = self._held + text
        if armed and (start := self._match(whole, len(self._held))) is not None:
            self._held = ""
            return whole[:start], True
        keep = self._beginning(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """The text held back, at the end of the stream."""
        text = self._held
        self._held = ""
        return text

    def _match(self, whole: str, old: int) -> int | None:
        """Where the first complete match begins that ends behind ``old`` characters."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = whole.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = start + len(stop), start
        return None if best is None else best[1]

    def _beginning(self, whole: str) -> int:
        """Length of the longest end of ``whole`` that is a proper beginning of a stop string."""
        return max((overlap(whole, stop) for stop in self._stops), default=0)


def overlap(whole: str, stop: str) -> int:
    """Length of the longest end of ``whole`` that is a proper beginning of ``stop``."""
    start = whole.find(stop[0], max(0, len(whole) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(whole[start:]):
            return len(whole) - start
        start = whole.find(stop[0], start + 1)
    return 0
