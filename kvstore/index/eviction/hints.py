"""Hints: which stored runs of blocks are expected to be used soon, and which late. Pure.

A hint is advice that eviction may ignore. A run that is expected soon is evicted after all others
of its scope. Blocks that are expected late age ``LATE_AGES`` times as fast as others: they tend to
go first, but old blocks without a hint still go too. A use ends either hint. Nothing is kept for a
hint beyond its time, beyond what its tenant may keep by hints, or when nothing else can be evicted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.index.deadlines import Deadlines
from kvstore.index.entries import IndexEntry
from kvstore.index.eviction.policy import EvictionNode
from kvstore.limits import HINTED_SHARE, MAX_RUNS

V = TypeVar("V")

SAMPLE = 8
"""Late blocks that are compared to find a victim."""

LATE_AGES = 8
"""How many times as fast a late block ages, in uses of other blocks."""


RUN_BYTES, KEPT_BYTES, LATE_BYTES = 400, 100, 150
"""Memory of a run expected soon, of a block kept for it, and of the end of a late run."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The leading blocks of one sequence, in order, and when they are expected to be used.

    It holds for ``life`` seconds. ``most`` is how many bytes the hints of ``tenant`` may keep.
    """

    names: Sequence[bytes]
    soon: bool
    life: float
    tenant: str
    most: int


@dataclass(slots=True)
class HintCounters:
    """As the fields of these names in ``kvstore.stats.StoreCounters``."""

    hints_received: int = 0
    hints_refused: int = 0
    hints_used: int = 0
    hints_expired: int = 0
    hints_yielded: int = 0


@dataclass(slots=True)
class _Run:
    """A run expected soon, known by its last stored block."""

    tenant: str
    deadline: float


@dataclass(slots=True)
class _Kept:
    """A block of runs expected soon: ``count`` of them end at it or at kept children."""

    count: int
    size: int
    tenant: str
    parent: bytes | None


class _Tenant:
    """What the hints of one tenant keep; ``latest`` has its runs by negative deadline."""

    def __init__(self) -> None:
        self.bytes = 0
        self.latest: Deadlines[bytes] = Deadlines()


class HintTable(Generic[V]):
    """The hints for ``blocks``, the stored blocks of one scope.

    ``cover`` makes a block no candidate for eviction until ``uncover``. A run is covered at its
    last block; the blocks before it have a child and are no candidates anyway.
    """

    def __init__(
        self,
        blocks: Mapping[bytes, IndexEntry[V]],
        cover: Callable[[bytes], None],
        uncover: Callable[[bytes], None],
        counters: HintCounters,
    ) -> None:
        self._blocks = blocks
        self._cover = cover
        self._uncover = uncover
        self._now = 0.0
        self._runs: dict[bytes, _Run] = {}
        self._late: OrderedDict[IndexEntry[V], None] = OrderedDict()  # ends of late runs
        self._ends: Deadlines[bytes] = Deadlines()
        self._kept: dict[bytes, _Kept] = {}
        self._tenants: dict[str, _Tenant] = {}
        self.counters = counters

    @property
    def overhead_bytes(self) -> int:
        """Memory of the table, as measured."""
        runs = RUN_BYTES * len(self._runs) + KEPT_BYTES * len(self._kept)
        return runs + LATE_BYTES * len(self._late)

    def kept(self, tenant: str) -> int:
        """Bytes that the hints of a tenant keep."""
        return self._tenants[tenant].bytes if tenant in self._tenants else 0

    def __len__(self) -> int:
        return len(self._runs)

    def advance(self, now: float) -> None:
        """End the hints whose time is over."""
        self._now = max(self._now, now)
        if self._ends.nothing_due(now):
            return
        for name in list(self._ends.due(now)):
            self.counters.hints_expired += 1
            self._end(name)

    def receive(self, hint: Hint, quota: int) -> None:
        """Take in a hint for a scope of ``quota`` bytes; it replaces what it contradicts."""
        self.counters.hints_received += 1
        run = self._stored_run(hint.names)
        if not run:
            return
        deadline = self._now + hint.life
        if not hint.soon:
            for entry in run:
                self._end(entry.name)
                entry.late_until = deadline
            self._late[run[-1]] = None
            return
        last = run[-1]
        last.late_until = 0.0
        if (before := self._runs.get(last.name)) is not None:
            self._set_end(last.name, before, max(deadline, before.deadline))
        elif self._keep(hint, last.name, quota):
            self._runs[last.name] = new = _Run(hint.tenant, deadline)
            self._set_end(last.name, new, deadline)
            self._cover(last.name)
        else:
            self.counters.hints_refused += 1

    def used(self, entry: IndexEntry[V]) -> None:
        """A block was used: what was expected has happened, or has not."""
        entry.late_until = 0.0
        if entry.name in self._runs or entry in self._late:
            self.counters.hints_used += 1
            self._late.pop(entry, None)
            self._end(entry.name)

    def removed(self, entry: IndexEntry[V]) -> None:
        """A block was removed: its parent may be the end of a late run now."""
        self._end(entry.name)
        self._late.pop(entry, None)
        parent = self._blocks.get(entry.parent or b"")
        if parent is not None and self._is_late(parent):
            self._late[parent] = None
            self._late.move_to_end(parent, last=False)

    def instead_of(
        self, victim: EvictionNode | None, choose: Callable[..., EvictionNode | None], newest: int
    ) -> EvictionNode | None:
        """The block to evict: ``victim`` of the policy, or a late one that it would ``choose``.

        ``newest`` is the time of the newest use, as ``EvictionNode.used``.
        """
        if not self._late or victim is None or self._is_late(victim):
            return victim
        late = choose(self._some_late())
        if late is None or LATE_AGES * (newest - late.used) < newest - victim.used:
            return victim
        return late

    def _is_late(self, node: EvictionNode) -> bool:
        return node.late_until > self._now

    def _some_late(self) -> list[IndexEntry[V]]:
        """Ends of some late runs, others at each call."""
        some = [entry for entry, _ in zip(self._late, range(SAMPLE), strict=False)]
        for entry in some:
            self._late.move_to_end(entry)
            if not self._is_late(entry):
                del self._late[entry]
                self.counters.hints_expired += 1
        return [entry for entry in some if entry in self._late]

    def yield_one(self) -> bool:
        """Give up the hint of latest use of the tenant that keeps most.

        Returns whether a hint was given up.
        """
        most = self._most_keeping()
        return most is not None and self._give_way(most, -math.inf)

    def _stored_run(self, names: Sequence[bytes]) -> list[IndexEntry[V]]:
        """The stored blocks that lead without a gap."""
        run = []
        for name in names:
            if (entry := self._blocks.get(name)) is None:
                break
            run.append(entry)
        return run

    def _keep(self, hint: Hint, last: bytes, quota: int) -> bool:
        """Charge a tenant for a run expected soon. Returns whether the hint may be kept.

        Room is made by hints of later use of the same tenant, then of one that keeps more.
        """
        deadline = self._now + hint.life
        if len(self._runs) >= MAX_RUNS:
            return False
        while True:
            added = self._new_blocks(last)  # more, once a run that shares some has given way
            size = sum(entry.size for entry in added)
            own, every = self.kept(hint.tenant), sum(one.bytes for one in self._tenants.values())
            most = self._most_keeping() or hint.tenant
            if own + size > hint.most or self.kept(most) < own + size:
                most = hint.tenant
            if own + size <= hint.most and every + size <= quota * HINTED_SHARE:
                break
            before = deadline if most == hint.tenant else -math.inf
            if size > min(hint.most, quota * HINTED_SHARE) or not self._give_way(most, before):
                return False
        tenant = self._tenants.setdefault(hint.tenant, _Tenant())
        tenant.bytes += size
        above = added[-1].parent if added else last
        above = above if above in self._kept else None
        if above is not None:
            self._kept[above].count += 1
        for entry in reversed(added):
            self._kept[entry.name] = _Kept(1, entry.size, hint.tenant, above)
            above = entry.name
        return True

    def _new_blocks(self, last: bytes) -> list[IndexEntry[V]]:
        """The blocks of a run that no hint keeps yet, the last one first."""
        added = []
        name: bytes | None = last
        while name is not None and name not in self._kept and name in self._blocks:
            added.append(self._blocks[name])
            name = self._blocks[name].parent
        return added

    def _give_way(self, tenant: str, deadline: float) -> bool:
        """Give up a tenant's hint of latest use if it is later than ``deadline``."""
        known = self._tenants.get(tenant)
        latest = None if known is None else known.latest.next()
        name = None if known is None else known.latest.first()
        if latest is None or name is None or -latest <= deadline:
            return False
        self.counters.hints_yielded += 1
        self._end(name)
        return True

    def _most_keeping(self) -> str | None:
        """The tenant with hints that keeps most: blocks may stay charged to one without any."""
        tenants = {name: known.bytes for name, known in self._tenants.items() if known.latest}
        return max(tenants, key=lambda name: tenants[name], default=None)

    def _set_end(self, name: bytes, run: _Run, deadline: float) -> None:
        run.deadline = deadline
        self._ends.set(name, deadline)
        self._tenants[run.tenant].latest.set(name, -deadline)

    def _end(self, name: bytes) -> None:
        """End the run that is expected soon at a block, if there is one."""
        if (run := self._runs.pop(name, None)) is None:
            return
        self._ends.drop(name)
        self._tenants[run.tenant].latest.drop(name)
        self._release(name)
        self._forget(run.tenant)
        self._uncover(name)

    def _release(self, last: bytes) -> None:
        """Uncharge the blocks that were kept for the run that ended at ``last`` alone."""
        name: bytes | None = last
        while name is not None:
            kept = self._kept[name]
            kept.count -= 1
            if kept.count:
                return
            del self._kept[name]
            self._tenants[kept.tenant].bytes -= kept.size
            self._forget(kept.tenant)
            name = kept.parent

    def _forget(self, tenant: str) -> None:
        known = self._tenants.get(tenant)
        if known is not None and not known.bytes and not known.latest:
            del self._tenants[tenant]
