"""The account of one leg, derived from its log of runs at any moment (I5 and I6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.core.request import Admission, Request, Run


@dataclass(frozen=True, slots=True)
class LegTokens:
    """``length = local + external + computed``: the tokens the leg started from, by source.

    ``local`` and ``external`` are those of the first admission: what the leg computed itself and
    finds again after a preemption is no hit. ``executed`` positions went through the runner, of
    which ``recomputed`` had been computed by this leg before. A leg that ended before its first
    token has computed only a part of its prompt.
    """

    length: int
    local: int
    external: int
    computed: int
    generated: int
    recomputed: int
    executed: int
    failed: int
    runs: tuple[Run, ...]


def leg_tokens(request: Request) -> LegTokens:
    """The account of a request as it is now."""
    length, runs = len(request.order.tokens), request.all_runs
    executed = sum(run.executed for run in runs)
    local, external = (runs[0].admission.local, runs[0].admission.external) if runs else (0, 0)
    furthest = max((run.frontier for run in runs), default=0)
    return LegTokens(
        length=length,
        local=local,
        external=external,
        computed=min(furthest, length) - local - external,
        generated=request.length - length,
        recomputed=executed - computed_positions(runs, 0, furthest) if len(runs) > 1 else 0,
        executed=executed,
        failed=request.failed,
        runs=runs,
    )


def computed_positions(runs: Sequence[Run], start: int, stop: int) -> int:
    """The number of positions of ``[start, stop)`` that at least one of the runs computed."""
    count, counted_to = 0, start
    for run in sorted(runs, key=lambda run: run.admission.hit):
        first, last = max(run.admission.hit, counted_to), min(run.frontier, stop)
        count += max(last - first, 0)
        counted_to = max(counted_to, last)
    return count


def missed_blocks(admission: Admission, block_size: int) -> int:
    """Blocks of an admission that were found neither in the pool nor in the store.

    The last position is always computed here, so its block counts only if other positions share it.
    """
    return -((admission.length - 1) // -block_size) + admission.hit // -block_size
