"""Sums over all legs of a worker since its start: one frozen record, replaced as legs go on.

Each leg adds its prompt once, with its first token, by the admission that made it, so that the
sums by source equal the prompt tokens at any moment, whatever was preempted or failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvrelay.engine.core.request import Admission, Finish
from kvrelay.engine.core.sources import add_by_store
from kvrelay.engine.core.updates import Missed
from kvrelay.engine.core.usage import LegTokens
from kvrelay.usage import Miss


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens, but for ``finished`` (legs by how they ended) and ``preemptions``.

    ``sources`` are the ``external`` ones by the store they came from. ``missed`` are blocks, by why
    they were.
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
        """Prompt tokens that were computed here: the rest."""
        return self.prompt - self.local - self.external

    @property
    def adds_up(self) -> bool:
        """I9: no source gave less than nothing or more than all, stores no more than they did."""
        by_store = sum(self.sources.values())
        return min(self.local, self.external, self.computed) >= 0 and by_store == self.external

    def with_first_token(
        self, admission: Admission, sources: Mapping[str, int], missed: Missed | None
    ) -> Totals:
        """A leg made its first token out of ``admission``.

        ``sources`` are its external tokens, ``missed`` the blocks it could have had and had not.
        """
        by_reason = dict(self.missed)
        if missed is not None:
            by_reason[missed.reason] = by_reason.get(missed.reason, 0) + missed.blocks
        return replace(
            self,
            missed=by_reason,
            prompt=self.prompt + admission.length,
            local=self.local + admission.local,
            external=self.external + admission.external,
            sources=add_by_store(self.sources, sources),
        )

    def with_late(self, tokens: int) -> Totals:
        """A load has brought so many, and who waited for it is gone."""
        return replace(self, late=self.late + tokens)

    def with_leg(self, leg: LegTokens, preemptions: int, finish: Finish | None) -> Totals:
        """A leg has left, finished, handed over (``None``) or aborted."""
        how = "handoff" if finish is None else finish.value
        return replace(
            self,
            generated=self.generated + leg.generated,
            recomputed=self.recomputed + leg.recomputed,
            failed=self.failed + leg.failed,
            executed=self.executed + leg.executed,
            preemptions=self.preemptions + preemptions,
            finished={**self.finished, how: self.finished.get(how, 0) + 1},
        )
