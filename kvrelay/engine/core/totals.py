"""Sums over all legs of a worker since its start: one frozen record, replaced at each change.

A sum moves in the step in which the event happens. Each leg adds its prompt once, with its first
token and by its first admission: the sums by source equal the prompt tokens at any moment, whatever
was preempted or failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvrelay.engine.core.external import add_counts
from kvrelay.engine.core.plan import Committed
from kvrelay.engine.core.request import Admission, Finish
from kvrelay.usage import Miss, MissedBlocks


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counts, except ``finished`` (legs by finish reason), ``preemptions`` and ``missed``.

    ``asked`` are the tokens that first admissions looked up in the store. ``sources`` are the
    ``external`` tokens by store. ``missed`` are blocks by reason.
    """

    prompt: int = 0
    local: int = 0
    external: int = 0
    generated: int = 0
    recomputed: int = 0
    failed: int = 0
    late: int = 0
    asked: int = 0
    executed: int = 0
    preemptions: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[Miss, int] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed here."""
        return self.prompt - self.local - self.external

    @property
    def adds_up(self) -> bool:
        """I9: no source is negative or more than the prompt; the stores sum to ``external``."""
        by_store = sum(self.sources.values())
        return min(self.local, self.external, self.computed) >= 0 and by_store == self.external

    def with_first_token(
        self, admission: Admission, sources: Mapping[str, int], missed: MissedBlocks | None
    ) -> Totals:
        """A leg made its first token.

        ``admission`` is its first one, ``sources`` are the external tokens of that by store, and
        ``missed`` are the blocks that it could not load.
        """
        by_reason = {} if missed is None else {missed.reason: missed.blocks}
        return replace(
            self,
            missed=add_counts(self.missed, by_reason),
            prompt=self.prompt + admission.length,
            local=self.local + admission.local,
            external=self.external + admission.external,
            sources=add_counts(self.sources, sources),
        )

    def with_question(self, tokens: int) -> Totals:
        """An admission of a leg that has not run looked up ``tokens`` more than those before it."""
        return replace(self, asked=self.asked + tokens)

    def with_load(self, failed: int, late: int) -> Totals:
        """A load ended: ``failed`` tokens were not loaded, ``late`` ones after the leg had left."""
        return replace(self, failed=self.failed + failed, late=self.late + late)

    def with_preemptions(self, count: int) -> Totals:
        """A plan preempted ``count`` requests."""
        return replace(self, preemptions=self.preemptions + count)

    def with_step(self, committed: Committed) -> Totals:
        """A step was committed."""
        return replace(
            self,
            generated=self.generated + len(committed.outputs),
            executed=self.executed + committed.executed,
            recomputed=self.recomputed + committed.recomputed,
        )

    def with_leg(self, finish: Finish | None) -> Totals:
        """A leg has left: finished, aborted, or handed over (``None``)."""
        how = "handoff" if finish is None else finish.value
        return replace(self, finished=add_counts(self.finished, {how: 1}))
