"""Several stores as one: an ordered list, the nearest first.

Block by block the first store that has it is its source, so a lead goes on across stores. All are
asked at once, and nobody waits for one whose answer could add nothing, or which was late before.
What is put goes to the first; to others, and what is read from others into the first, only if so
configured, and then behind everybody's back. A store that fails is a store that has nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from contextlib import closing

from kvrelay.errors import DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.usage import Miss
from kvstore.base import (
    Block,
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    Store,
    SurveyResult,
    Tail,
    Want,
)
from kvstore.limits import MAX_NAMES
from kvstore.multi.backend import StoreBackend
from kvstore.multi.fetch import fetch
from kvstore.multi.survey import call_all, survey
from kvstore.multi.union import boot_of, owners, surveyed, united
from kvstore.multi.write_behind import copy_of
from kvstore.stats import StoreStats, total_stats


class MultiStore:
    """A ``Store`` of stores, each with its name."""

    def __init__(self, arms: Sequence[StoreBackend]) -> None:
        names = [arm.name for arm in arms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise Rejected("store", f"{twice[0]} stands twice in the list")
        self.arms = tuple(arms)
        self._by_name = {arm.name: arm for arm in arms}

    @property
    def url(self) -> str:
        """As the protocol says."""
        return ",".join(arm.store.url for arm in self.arms)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """As the protocol says, over all stores."""
        names = names[: MAX_NAMES - len(tails)]
        asked = [*names, *(tail.name for tail in tails)]
        answers = survey(self.arms, asked, len(names), ttl, timeout, openings)
        found = united(answers, len(names), tails)
        self._give_back(answers, found.lease)
        if len(answers) < len(self.arms) and found.missing is Miss.NEVER_STORED:
            return dataclasses.replace(found, missing=Miss.UNREACHABLE)
        return found

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """As the protocol says, over all stores."""
        answers = survey(self.arms, names, len(names), ttl, timeout, openings)
        seen = surveyed(answers, len(names))
        self._give_back(answers, seen.lease)
        return seen

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """As the protocol says. What the caller goes on after is taken to be right, and promoted;
        a store whose block he leaves at is doubted."""
        deadline = time.monotonic() + timeout
        arms = self._sources(wants, timeout)
        with closing(fetch(arms, wants, deadline - time.monotonic())) as arriving:
            for got in arriving:
                arm, want = arms[got.index], wants[got.index]
                if arm is not None and got.header is None and want.source is not None:
                    arm.doubt()
                try:
                    yield got
                except GeneratorExit:
                    if arm is not None:
                        arm.doubt()
                        arm.look_again(want)
                    raise
                if arm is not None and got.header is not None and arm.promote:
                    self._promote(want, got.header)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says: into the first of those to be written that is there."""
        deadline = time.monotonic() + timeout
        writers = [self.arms[0], *(arm for arm in self.arms[1:] if arm.write)]
        while True:
            first, *later = writers
            try:
                return _put(first, later, offers, deadline - time.monotonic())
            except Unavailable:
                if not later:
                    raise
                writers = later

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says; a store that was late is told and not waited for."""
        held: dict[str, list[Lease]] = {}
        for lease in leases:
            if lease.boot == boot_of(lease.parts):
                for name, part in lease.parts:
                    held.setdefault(name, []).append(part)
        told = {arm: arm.ask(_releasing(held[arm.name]), timeout) for arm in self._named(held)}
        done, open_ = wait([told[arm] for arm in told if not arm.late], timeout)
        for future in done:
            future.result()
        if open_:
            raise DeadlineExceeded("leases were not taken back in time; they end by their deadline")

    def stats(self, timeout: float) -> StoreStats:
        """The sums over the stores that answer; ``each`` has them one by one."""
        found = [stats for _, stats in self.each(timeout)]
        there = [stats for stats in found if isinstance(stats, StoreStats)]
        if not there:
            raise next(error for error in found if isinstance(error, KvrelayError))
        return total_stats(there)

    def each(self, timeout: float) -> list[tuple[str, StoreStats | KvrelayError]]:
        """Name and figures of each store, or why there are none."""
        found = call_all(self.arms, lambda store, left: store.stats(left), timeout)
        return [(arm.name, stats) for arm, stats in zip(self.arms, found, strict=True)]

    def clear(self, timeout: float) -> int:
        """As the protocol says, in every store; the first error after all have been told."""
        removed = 0
        found = call_all(self.arms, lambda store, left: store.clear(left), timeout)
        for count in found:
            if isinstance(count, KvrelayError):
                raise count
            removed += count
        return removed

    def close(self) -> None:
        """As the protocol says."""
        for arm in self.arms:
            arm.close()

    def _named(self, names: dict[str, list[Lease]]) -> list[StoreBackend]:
        return [arm for arm in self.arms if arm.name in names]

    def _give_back(self, answers: dict[str, SurveyResult], kept: Lease | None) -> None:
        """The leases that are no part of the one that is kept."""
        needed = {name for name, _ in kept.parts} if kept is not None else set()
        for name, seen in answers.items():
            if name not in needed:
                self._by_name[name].give_back(seen.lease)

    def _sources(self, wants: Sequence[Want], timeout: float) -> list[StoreBackend | None]:
        """The store of each; those that no lookup has told are looked for."""
        arms = [self._by_name.get(want.source or "") for want in wants]
        unknown = [index for index, arm in enumerate(arms) if arm is None]
        for start in range(0, len(unknown), MAX_NAMES):
            indices = unknown[start : start + MAX_NAMES]
            names = [wants[index].name for index in indices]
            answers = survey(self.arms, names, len(names), 0.0, timeout)
            for index, owner in zip(indices, owners(answers, len(names)), strict=True):
                arms[index] = self._by_name.get(owner or "")
        return arms

    def _promote(self, want: Want, header: bytes) -> None:
        behind = self.arms[0].behind
        if behind.room(len(header) + want.buffer.nbytes):
            behind.add(copy_of(want.name, Block(header, want.buffer), want.partial))
        else:
            behind.drop()


def _put(
    arm: StoreBackend, later: Sequence[StoreBackend], offers: Sequence[Offer], timeout: float
) -> list[Outcome]:
    """Put into one store; what it took is written to the ``later`` ones in the background."""
    if not later:
        return arm.store.put(offers, timeout)
    copies: dict[bytes, Offer] = {}
    outcomes = arm.store.put([_copied(offer, later, copies) for offer in offers], timeout)
    for offer, outcome in zip(offers, outcomes, strict=True):
        if outcome.status is PutStatus.STORED:
            for other in later:
                if (copy := copies.get(offer.name)) is not None:
                    other.behind.add(copy)
                else:
                    other.behind.drop()
    return outcomes


def _copied(offer: Offer, later: Sequence[StoreBackend], copies: dict[bytes, Offer]) -> Offer:
    """The offer; once it is read there is a copy of it, if any of ``later`` has room."""

    def read() -> Block:
        block = offer.read()
        if any(arm.behind.room(offer.size) for arm in later):
            copies[offer.name] = copy_of(offer.name, block, offer.partial)
        return block

    return dataclasses.replace(offer, read=read)


def _releasing(leases: list[Lease]) -> Callable[[Store, float], None]:
    return lambda store, left: store.release(leases, left)
