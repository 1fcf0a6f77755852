"""Sums over all legs of a worker since its start: one frozen record, replaced at each change.

Each leg adds its prompt once, with its first token, by the admission that made it: the sums by
source equal the prompt tokens at any moment, whatever was preempted or failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvrelay.engine.core.external import add_counts
from kvrelay.engine.core.request import Admission, Finish
from kvrelay.engine.core.usage import LegTokens
from kvrelay.usage import Miss, MissedBlocks


@dataclass(frozen=True, slots=True)
class Totals:
    """Token counts, except ``finished`` (legs by finish reason), ``preemptions`` and ``missed``.

    ``sources`` are the ``external`` tokens by store. ``missed`` are blocks by reason.
    """

    prompt: int = 0
    local: int = 0
    external: int = 0
    generated: int = 0
    recomputed: int = 0
    failed: int = 0
    late: int = 0
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
        """A leg made its first token out of ``admission``.

        ``sources`` are its external tokens by store, ``missed`` the blocks it did not load.
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

    def with_late(self, tokens: int) -> Totals:
        """A load ended with ``tokens`` after its request had left."""
        return replace(self, late=self.late + tokens)

    def with_leg(self, leg: LegTokens, preemptions: int, finish: Finish | None) -> Totals:
        """A leg has left: finished, aborted, or handed over (``None``)."""
        how = "handoff" if finish is None else finish.value
        return replace(
            self,
            generated=self.generated + leg.generated,
            recomputed=self.recomputed + leg.recomputed,
            failed=self.failed + leg.failed,
            executed=self.executed + leg.executed,
            preemptions=self.preemptions + preemptions,
            finished=add_counts(self.finished, {how: 1}),
        )
