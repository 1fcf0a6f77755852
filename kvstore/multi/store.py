"""Several stores as one: an ordered list of backends, the nearest first.

The first backend that has a block is its source, so a lead continues across backends. All are
asked at once; a call does not wait for one that is late or could add nothing. Puts go to the first
backend. If configured, they also go to later backends, and blocks read from later ones into the
first, by write-behind. A backend that fails counts as empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence, Set
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace

from kvrelay.errors import DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.usage import Miss
from kvstore.base import (
    Block,
    GetResult,
    Lease,
    LookupResult,
    NameQuery,
    Offer,
    Outcome,
    PutStatus,
    Store,
    SurveyResult,
    Want,
)
from kvstore.limits import MAX_NAMES
from kvstore.multi.backend import StoreBackend
from kvstore.multi.fetch import fetch
from kvstore.multi.survey import call_all, survey
from kvstore.multi.union import boot_of, owners, surveyed, united
from kvstore.multi.write_behind import copy_of
from kvstore.stats import StoreStats, total_stats

MOST_ONLY = 1 << 12
"""How many blocks of a single backend are remembered; the oldest are forgotten."""

COPIED = {PutStatus.STORED, PutStatus.NO_ROOM, PutStatus.NO_PARENT, PutStatus.EXPIRED}
"""Blocks with these outcomes go on to later backends: new ones, stored or not."""


class MultiStore:
    """A ``Store`` of backends with distinct names."""

    def __init__(self, backends: Sequence[StoreBackend]) -> None:
        names = [backend.name for backend in backends]
        if twice := [name for name in names if names.count(name) > 1]:
            raise Rejected("store", f"{twice[0]} is in the list twice")
        self.backends = tuple(backends)
        self._lock = threading.Lock()
        self._only: dict[bytes, None] = {}  # names of blocks that no other backend has
        self._by_name = {backend.name: backend for backend in backends}

    @property
    def url(self) -> str:
        return ",".join(backend.store.url for backend in self.backends)

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        tails = query.tails
        names = query.names[: MAX_NAMES - len(tails)]
        asked = replace(query, names=[*names, *(tail.name for tail in tails)], tails=())
        answers = survey(self.backends, asked, len(names), timeout)
        result = united(answers, len(names), tails)
        self._release_unused(answers, result.lease)
        if len(answers) < len(self.backends) and result.missing is Miss.NEVER_STORED:
            return replace(result, missing=Miss.UNREACHABLE)
        return result

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        answers = survey(self.backends, query, len(query.names), timeout)
        seen = surveyed(answers, len(query.names))
        self._release_unused(answers, seen.lease)
        return seen

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """A block counts as right, and is promoted, if the caller continues after it.

        If the caller stops at a block, its backend is doubted.
        """
        deadline = time.monotonic() + timeout
        if wants and wants[0].device is not None:
            # A block that is promoted is read from the want's buffer.
            wants = [replace(want, device=None) for want in wants]
        backends = self._sources(wants, timeout)
        with closing(fetch(backends, wants, deadline - time.monotonic())) as arriving:
            for got in arriving:
                backend, want = backends[got.index], wants[got.index]
                if backend is not None and not got.header and want.source is not None:
                    backend.doubt()
                try:
                    yield got
                except GeneratorExit:
                    if backend is not None:
                        backend.doubt()
                        backend.recheck(want)
                    raise
                if backend is not None and got.header and backend.promote:
                    self._promote(want, got.header)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """Puts into the first backend that is written to and available."""
        deadline = time.monotonic() + timeout
        offers = self._detached(offers)
        writers = [self.backends[0], *(backend for backend in self.backends[1:] if backend.write)]
        while True:
            first, *later = writers
            try:
                outcomes, copied = _put(first, later, offers, deadline - time.monotonic())
            except Unavailable:
                if not later:
                    raise
                writers = later
            else:
                if first is not self.backends[0]:
                    copied |= _present(offers, outcomes)
                self._remember(offers, outcomes, copied)
                return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """Does not wait for backends that are late."""
        held: dict[str, list[Lease]] = {}
        for lease in leases:
            if lease.boot == boot_of(lease.parts):
                for name, part in lease.parts:
                    held.setdefault(name, []).append(part)
        named = [backend for backend in self.backends if backend.name in held]
        released = {
            backend: backend.submit(_releasing(held[backend.name]), timeout) for backend in named
        }
        done, running = wait([released[backend] for backend in named if not backend.late], timeout)
        for future in done:
            future.result()
        if running:
            raise DeadlineExceeded("leases were not released in time; they end by their deadline")

    def stats(self, timeout: float) -> StoreStats:
        """The sums over the backends that answer; ``each`` returns them one by one."""
        answers = [stats for _, stats in self.each(timeout)]
        answered = [stats for stats in answers if isinstance(stats, StoreStats)]
        if not answered:
            raise next(error for error in answers if isinstance(error, KvrelayError))
        return total_stats(answered)

    def each(self, timeout: float) -> list[tuple[str, StoreStats | KvrelayError]]:
        """Name, and figures or error, of each backend."""
        answers = call_all(self.backends, lambda store, left: store.stats(left), timeout)
        return [
            (backend.name, stats) for backend, stats in zip(self.backends, answers, strict=True)
        ]

    def clear(self, timeout: float) -> int:
        """Clears every backend, then raises the first error, if any."""
        removed = 0
        answers = call_all(self.backends, lambda store, left: store.clear(left), timeout)
        for count in answers:
            if isinstance(count, KvrelayError):
                raise count
            removed += count
        return removed

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def _release_unused(self, answers: dict[str, SurveyResult], kept: Lease | None) -> None:
        """Release the leases that are no part of the lease ``kept``."""
        needed = {name for name, _ in kept.parts} if kept is not None else set()
        for name, seen in answers.items():
            if name not in needed:
                self._by_name[name].release(seen.lease)

    def _sources(self, wants: Sequence[Want], timeout: float) -> list[StoreBackend | None]:
        """The backend of each want; blocks without a source are looked up."""
        backends = [self._by_name.get(want.source or "") for want in wants]
        unknown = [index for index, backend in enumerate(backends) if backend is None]
        for start in range(0, len(unknown), MAX_NAMES):
            indices = unknown[start : start + MAX_NAMES]
            query = NameQuery([wants[index].name for index in indices])
            answers = survey(self.backends, query, len(indices), timeout)
            for index, owner in zip(indices, owners(answers, len(indices)), strict=True):
                backends[index] = self._by_name.get(owner or "")
        return backends

    def _detached(self, offers: Sequence[Offer]) -> list[Offer]:
        """The offers, ``detached`` where another backend may have the parent."""
        with self._lock:
            here = {offer.name for offer in offers} | self._only.keys()
        return [replace(offer, detached=offer.parent not in here) for offer in offers]

    def _remember(
        self, offers: Sequence[Offer], outcomes: Sequence[Outcome], copied: Set[bytes]
    ) -> None:
        """Remember the blocks that no later backend has, for the children in later calls."""
        with self._lock:
            for offer, outcome in zip(offers, outcomes, strict=True):
                self._only.pop(offer.name, None)
                if outcome.status is not PutStatus.EXISTED and offer.name not in copied:
                    self._only[offer.name] = None
            while len(self._only) > MOST_ONLY:
                del self._only[next(iter(self._only))]

    def _promote(self, want: Want, header: bytes) -> None:
        writer = self.backends[0].writer
        if writer.has_room(len(header) + want.buffer.nbytes):
            writer.add(copy_of(want.name, Block(header, want.buffer), want.partial))
        else:
            writer.drop()


def _present(offers: Sequence[Offer], outcomes: Sequence[Outcome]) -> set[bytes]:
    """The names of the blocks that the backend has."""
    return {offer.name for offer, kept in zip(offers, outcomes, strict=True) if kept.present}


def _put(
    backend: StoreBackend, later: Sequence[StoreBackend], offers: Sequence[Offer], timeout: float
) -> tuple[list[Outcome], set[bytes]]:
    """Put into one backend, and by write-behind into the ``later`` ones.

    These also get the blocks that the first has no room for. Returns the outcomes of the first, and
    the names of the blocks that a later one gets.
    """
    if not later:
        return backend.store.put(offers, timeout), set()
    copies: dict[bytes, Offer] = {}
    reading = [_copied(offer, later, copies) for offer in offers]
    outcomes = backend.store.put(reading, timeout)
    written: set[bytes] = set()
    for offer, outcome in zip(reading, outcomes, strict=True):
        if outcome.status not in COPIED:
            continue
        if offer.name not in copies and _have_room(later, offer):
            offer.read()
        for other in later:
            if (copy := copies.get(offer.name)) is None:
                other.writer.drop()
            elif other.writer.add(copy):
                written.add(offer.name)
    return outcomes, written


def _have_room(backends: Sequence[StoreBackend], offer: Offer) -> bool:
    return any(backend.writer.has_room(offer.size) for backend in backends)


def _copied(offer: Offer, later: Sequence[StoreBackend], copies: dict[bytes, Offer]) -> Offer:
    """The offer; reading it also copies the block if any of ``later`` has room."""

    def read() -> Block:
        block = offer.read()
        if _have_room(later, offer):
            copies[offer.name] = copy_of(offer.name, block, offer.partial)
        return block

    return replace(offer, read=read)


def _releasing(leases: list[Lease]) -> Callable[[Store, float], None]:
    return lambda store, left: store.release(leases, left)
