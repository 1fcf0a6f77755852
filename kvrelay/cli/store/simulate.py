"""``kvrelay store simulate TRACE``: hit rates of eviction policies on a trace of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cli.screen import print_err, print_out, table
from kvrelay.config.reader import load, option, required
from kvrelay.errors import Rejected
from kvstore.index.eviction import make_policy
from kvstore.limits import EVICTIONS
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest, read_trace
from kvstore.trace.simulate import ReplayResult, replay, unbounded

DESCRIPTION = """\
Replays a trace through the store's own index, without moving a byte, and prints the hit rates of
each eviction policy, of a store without a limit, and of the offline optimum, which knows the rest
of the trace. TRACE has one JSON object a line, as in Mooncake's published traces: timestamp (ms),
input_length, output_length and hash_ids."""
HEAD = ("blocks", "policy", "hit rate", "of the way to the optimum", "evicted")
RIGHT = frozenset({0, 2, 3, 4})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """The trace, and the stores to simulate."""

    trace: str = required(str, "file of the requests", metavar="TRACE", positional=True)
    budgets: tuple[int, ...] = option((1000, 10_000, 50_000), "room in blocks", low=1)
    policy: tuple[str, ...] = option(EVICTIONS, "eviction", choices=EVICTIONS)
    limit: int | None = option(None, "most requests to replay", low=1)
    json: bool = option(False, "print JSON")


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One row; ``budget`` is ``None`` for the store without a limit."""

    budget: int | None
    policy: str
    outcome: ReplayResult
    gain: float | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "budget": self.budget,
            "policy": self.policy,
            "blocks": self.outcome.blocks,
            "hits": self.outcome.hits,
            "hit_rate": self.outcome.rate,
            "evicted": self.outcome.evicted,
            "gain": self.gain,
        }

    def cells(self) -> list[str]:
        return [
            "no limit" if self.budget is None else f"{self.budget:,}",
            self.policy,
            f"{self.outcome.rate:.2%}",
            "" if self.gain is None else f"{self.gain:.0%}",
            f"{self.outcome.evicted:,}",
        ]


def main(argv: Sequence[str]) -> int:
    config = load(SimulateConfig, argv, "kvrelay store simulate", DESCRIPTION)
    trace = list(read_trace(Path(config.trace), config.limit))
    if not trace:
        raise Rejected("trace", f"{config.trace} has no requests")
    found = []
    for row in rows(trace, config.budgets, config.policy):
        found.append(row)
        print_err(f"  {' '.join(row.cells()[:3])}")
    if config.json:
        figures = {"requests": len(trace), "rows": [row.as_json() for row in found]}
        print_out(json.dumps(figures, indent=2))
        return 0
    print_out(f"{len(trace):,} requests, {trace[-1].at - trace[0].at:,.0f} s")
    print_out(table(HEAD, [row.cells() for row in found], RIGHT))
    return 0


def rows(
    trace: Sequence[TraceRequest], budgets: Sequence[int], names: Sequence[str]
) -> Iterator[PolicyRow]:
    """LRU, the requested policies and the optimum at each budget."""
    for budget in budgets:
        plain = replay(trace, budget, make_policy("lru"))
        best = optimum(trace, budget)
        yield PolicyRow(budget, "lru", plain)
        for name in names:
            if name != "lru":
                outcome = replay(trace, budget, make_policy(name))
                yield PolicyRow(budget, name, outcome, gain(outcome, plain, best))
        yield PolicyRow(budget, "optimum", best)
    yield PolicyRow(None, "any", unbounded(trace))


def gain(outcome: ReplayResult, plain: ReplayResult, best: ReplayResult) -> float | None:
    """The share of the gap from LRU to the optimum; ``None`` where there is no gap."""
    if best.hits == plain.hits:
        return None
    return (outcome.hits - plain.hits) / (best.hits - plain.hits)
