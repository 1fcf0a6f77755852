"""The account of one leg, derived from its log of runs when it has ended (I5 and I6)."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.core.request import Admission, Request, Run


@dataclass(frozen=True, slots=True)
class LegTokens:
    """``length = local + external + computed``: the tokens the leg started from, by source.

    They are those of the admission that made the leg's first token, or of the last admission if
    there is no token. ``executed`` positions went through the runner: ``computed``, the positions
    of generated tokens, and those ``recomputed`` after preemptions.
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


def first_run(request: Request) -> Run | None:
    """The run that made the leg's first token; else the last run, ``None`` without runs."""
    runs, length = request.runs, len(request.order.tokens)
    return next((run for run in runs if run.frontier >= length), runs[-1] if runs else None)


def leg_tokens(request: Request) -> LegTokens:
    """The account of a finished request."""
    length, runs = len(request.order.tokens), tuple(request.runs)
    executed = sum(run.executed for run in runs)
    first = first_run(request)
    local, external = (first.admission.local, first.admission.external) if first else (0, 0)
    computed = min(first.frontier, length) - local - external if first else 0
    beyond = max((run.frontier - length for run in runs if run.frontier > length), default=0)
    return LegTokens(
        length=length,
        local=local,
        external=external,
        computed=computed,
        generated=request.length - length,
        recomputed=executed - computed - beyond,
        executed=executed,
        failed=request.failed,
        runs=runs,
    )


def missed_blocks(admission: Admission, block_size: int) -> int:
    """Blocks of an admission that were found neither in the pool nor in the store.

    The last position is always computed here, so its block counts only if other positions share it.
    """
    return -((admission.length - 1) // -block_size) + admission.hit // -block_size
