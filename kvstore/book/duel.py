"""Would the plain rule have done better? Both are counted on the same requests, exactly enough.

A block is in a least-recently-used store of N blocks exactly when fewer than N others were used
after it. Those are counted in steps of ``STEP`` uses, over what is there and what is remembered. So
of each block asked for it is known whether this store and whether a plain one has it. When the
plain one has won by ``LOSS`` of the store, it is copied for a while, each time for twice as long:
what there is to lose is a fixed number of blocks, seldom. The count is a CUSUM test (E. S. Page,
Biometrika 41, 1954).
"""

from __future__ import annotations

STEP = 16
LOSS = 8
"""Losing an eighth of the store's blocks is a loss: less is what luck does with a few prompts."""

SPELL, LONGEST = 4, 64
"""How long the plain rule is copied, in turnovers of the store: until its contents are the plain
rule's own and some have been used; and at most."""


class Duel:
    """``plain`` says whether to copy the plain rule now."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # blocks by when they were last used
        self._edge = self._inside = 0  # the oldest step a plain store has all of, and how many
        self._lost = self._until = 0
        self._spell = SPELL
        self.plain = False

    def enter(self, used: int) -> None:
        """A block has been used as number ``used``."""
        step = used // STEP
        self._steps[step] = self._steps.get(step, 0) + 1
        self._inside += step >= self._edge

    def leave(self, used: int) -> None:
        """It is used again, or not remembered any more."""
        step = used // STEP
        self._steps[step] -= 1
        if not self._steps[step]:
            del self._steps[step]
        self._inside -= step >= self._edge

    def asked(self, used: int, there: bool, size: int, serial: int) -> None:
        """A block last used as ``used`` is asked for; the store has ``size`` blocks and is full."""
        self._slide(size, serial // STEP)
        if self.plain:
            if serial >= self._until:
                self.plain, self._lost = False, 0
            return
        has = used // STEP > self._edge
        self._lost = max(0, self._lost + has - there)
        if self._lost > size // LOSS:
            self.plain, self._until = True, serial + self._spell * size
            self._spell = min(2 * self._spell, LONGEST)

    def _slide(self, size: int, newest: int) -> None:
        """Forward only: should the store grow, what is used from now on fills it."""
        while self._edge < newest:
            count = self._inside - self._steps.get(self._edge, 0)
            if count < size:
                return
            self._inside, self._edge = count, self._edge + 1
