"""What the two sides of the connector tell each other through vLLM, once a step.

The scheduler's side orders loads and saves; each rank reports those that have ended. With tensor
parallelism the heads are split into shards: every rank of a shard holds the same heads, and each
shard has blocks with names of their own. An order counts once all ranks have reported it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.connector.geometry import LoadTarget
from kvrelay.engine.core.external import BlockContent
from kvrelay.usage import Miss


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill positions ``[local, local + external)``; ``targets`` are the blocks of each shard."""

    request_id: str
    epoch: int
    local: int
    external: int
    blocks: tuple[int, ...]
    targets: tuple[tuple[LoadTarget, ...], ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy blocks to the store; ``contents`` are those of each shard, in the same order."""

    request_id: str
    epoch: int
    serial: int
    space: bytes
    contents: tuple[tuple[BlockContent, ...], ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The orders of one step; in an ``idle`` one vLLM computes nothing and may wait for loads."""

    loads: tuple[LoadOrder, ...]
    saves: tuple[SaveOrder, ...]
    idle: bool


@dataclass(frozen=True, slots=True)
class LoadReport:
    """On ``ranks`` ranks at least ``valid`` leading tokens were loaded and verified."""

    valid: int
    missed: Miss | None
    sources: tuple[tuple[str, int], ...]
    ranks: int = 1

    def joined(self, other: LoadReport) -> LoadReport:
        """The smaller of the two, for the ranks of both."""
        least = min(self, other, key=lambda one: one.valid)
        missed = least.missed or self.missed or other.missed
        return LoadReport(least.valid, missed, least.sources, self.ranks + other.ranks)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """On ``ranks`` ranks at least the first ``stored`` blocks of a save are in the store."""

    stored: int
    ranks: int = 1

    def joined(self, other: SaveReport) -> SaveReport:
        """The smaller of the two, for the ranks of both."""
        return SaveReport(min(self.stored, other.stored), self.ranks + other.ranks)


@dataclass(slots=True)
class RankReports:
    """What ended since the last step, by order; vLLM merges those of all ranks."""

    loads: dict[tuple[str, int], LoadReport] = field(default_factory=dict)
    saves: dict[tuple[str, int, int], SaveReport] = field(default_factory=dict)

    def add(self, other: RankReports) -> None:
        """Merge what other ranks, or later steps, reported."""
        for load, report in other.loads.items():
            known = self.loads.get(load)
            self.loads[load] = report if known is None else known.joined(report)
        for save, saved in other.saves.items():
            before = self.saves.get(save)
            self.saves[save] = saved if before is None else before.joined(saved)

    def take_complete(self, ranks: int) -> RankReports:
        """Remove and return what all ranks have reported."""
        loads = {key: one for key, one in self.loads.items() if one.ranks >= ranks}
        saves = {key: one for key, one in self.saves.items() if one.ranks >= ranks}
        self.loads = {key: one for key, one in self.loads.items() if key not in loads}
        self.saves = {key: one for key, one in self.saves.items() if key not in saves}
        return RankReports(loads, saves)

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves)
