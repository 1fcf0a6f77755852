"""Breadth-first through every state of a case: all events, all invariants, duplicates cut.

From each state the fair continuation (nobody comes or goes, everything outside ends) must finish
every request, whether the store is gone, delivers, or promises and never delivers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.core.audit import audit
from tests.accounting.case import Case
from tests.accounting.events import Broken, Event, carry_out, expect, successors
from tests.accounting.world import Snapshot, World, unpack

# What a lookup answers and what a load delivers, by the kind of store.
STORES: dict[str, tuple[int, int]] = {"gone": (0, 0), "there": (99, 99), "lying": (99, 0)}


@dataclass
class Found:
    """What an exploration has seen; ``closed``: no state lies beyond the depth.

    ``bound``: no level is begun beyond so many states; 0 if there is no such bound.
    """

    case: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    closed: bool = False
    bound: int = 0
    seconds: float = 0.0
    news: list[int] = field(default_factory=list)  # new states of each level
    events: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        reach = "all there are" if self.closed else f"bound {self.bound:,}"
        return (
            f"{self.case:<28} {self.states:>9,} states {self.transitions:>11,} transitions"
            f"  depth {self.depth:>2} ({reach}) {self.seconds:7.1f} s"
        )


class Explorer:
    """The states of one case, level by level."""

    def __init__(self, case: Case, most: int | None = None) -> None:
        self.case = case
        self.most = most
        self.found = Found(case.name)
        self._blank = World(case)
        self._seen: set[int] = set()
        self._live: dict[str, set[int]] = {store: set() for store in STORES}

    def run(self, tell: Callable[[Found], None] = lambda _: None) -> Found:
        """Explore whole levels, to the case's depth or until there are ``most`` states.

        Raises ``Broken`` with the path to what is broken.
        """
        started = time.perf_counter()
        first = self._blank.snapshot()
        self._seen.add(first.key())
        level: list[tuple[bytes, bytes]] = [(first.pack(), b"")]
        if self.most is not None:
            self.found.bound = max(self.most, self.case.most)
        while level and self.found.depth < self.case.depth:
            if 0 < self.found.bound <= len(self._seen):
                break
            level = self.grow(level)
            self.found.news.append(len(level))
            self.found.depth += 1
            self.found.states = len(self._seen)
            self.found.seconds = time.perf_counter() - started
            tell(self.found)
        self.found.closed = not level
        return self.found

    def grow(self, level: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The new states one event after those of a level, each with its path."""
        after: list[tuple[bytes, bytes]] = []
        for packed, path in level:
            snapshot = unpack(packed)
            place = -1
            try:
                for place, (event, world) in enumerate(successors(snapshot, self._blank)):
                    self.found.transitions += 1
                    self.found.events[event[0]] += 1
                    new = world.snapshot()
                    if self._is_new(new, world):
                        after.append((new.pack(), path + place.to_bytes(2, "big")))
            except Exception as error:
                raise Broken(f"{error!r} after {self.tell(path)}, then number {place}") from error
        return after

    def _is_new(self, snapshot: Snapshot, world: World) -> bool:
        key = snapshot.key()
        if key in self._seen:
            return False
        self._seen.add(key)
        findings = audit(world.scheduler)
        expect(not findings, findings)
        self._check_wrong_events(snapshot, key)
        for store in STORES:
            self._check_live(snapshot, key, store)
        return True

    def _check_wrong_events(self, snapshot: Snapshot, key: int) -> None:
        """I7: events that are late, repeated, unknown or of another epoch change nothing."""
        world = World.restore(self.case, snapshot)
        scheduler, told = world.scheduler, 0
        for order in (*self.case.orders, None):
            request_id = "unknown" if order is None else order.request_id
            for epoch in range(len(self.case.orders) + len(snapshot.core.loads) + 2):
                if (request_id, epoch) not in scheduler.loads:
                    expect(scheduler.loaded(request_id, epoch, 1) is None, "a wrong event is heard")
                    told += 1
            scheduler.saved(request_id, 1, 1)
            told += 1
        expect(scheduler.late_events == told, "late events are not counted", told)
        expect(world.snapshot().key() == key, "a wrong event has an effect")

    def _check_live(self, snapshot: Snapshot, key: int, store: str) -> None:
        """I8: the fair continuation ends, every block free; known states are not walked again."""
        walked: set[int] = set()
        live = self._live[store]
        while key not in live:
            expect(key not in walked, f"for ever, the store being {store}", snapshot)
            walked.add(key)
            world = World.restore(self.case, snapshot)
            event = _continue(world, store)
            if event is None:
                expect(not any(world.scheduler.pool.references), "held at the end", snapshot)
                break
            carry_out(world, event)
            self.found.transitions += 1
            snapshot = world.snapshot()
            key = snapshot.key()
        live |= walked

    def tell(self, path: bytes) -> list[Event]:
        """The events of a path."""
        snapshot, told = self._blank.snapshot(), []
        for place in range(0, len(path), 2):
            number = int.from_bytes(path[place : place + 2], "big")
            for at, (event, world) in enumerate(successors(snapshot, self._blank)):
                if at == number:
                    told.append(event)
                    snapshot = world.snapshot()
                    break
        return told


def _continue(world: World, store: str) -> Event | None:
    """The next fair event: what is under way ends, then a step."""
    scheduler, (says, delivers) = world.scheduler, STORES[store]
    if world.plan is not None:
        return "commit", ()
    if scheduler.loads:
        return "loaded", (0, delivers)
    if scheduler.saves:
        return "saved", (0,)
    if scheduler.requests:
        return "schedule", (says,) * len(scheduler.waiting)
    return None
