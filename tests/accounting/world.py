"""The core with everything around it, as one value that can be copied, compared and continued.

A snapshot is canonical: blocks are renamed by their place in the free list and the tables, epochs
by appearance, serials dropped. What KV the slots hold is no part of it. It follows from the
invariants, so a restored world holds rubbish wherever they promise nothing.
"""

from __future__ import annotations

import marshal
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from kvrelay.engine.core.external import Query, Save
from kvrelay.engine.core.plan import Entry, Plan
from kvrelay.engine.core.request import Admission, Request, RequestState, Residency, Run
from kvrelay.engine.core.scheduler import Scheduler
from tests.accounting.case import NAMING, RUBBISH, Case, contents

STATES = list(RequestState)
CODES = {state: code for code, state in enumerate(STATES)}
Numbers = tuple[int, ...]
Admitted = tuple[int, int, int, int]  # epoch, length, local, external
Pieces = tuple[tuple[int, bytes, int], ...]  # block, name, count of positions
Hits = tuple[int, int]  # local and external of the first admission, its load ended
# lives, state, length, lookups left, first hits, admission, blocks, computed, epoch of the load
# that was given up and still runs, blocks named so far; only lives when absent
Numbered = tuple[int, int, int, int | None, Hits | None, Admitted | None, Numbers, int, int, int]
Standing = Numbered | int
# names, failed, how often each position was executed, runs
Log = tuple[int, int, bytes, tuple[tuple[int, int, int, int], ...]]


class Core(NamedTuple):
    """All that the next step depends on."""

    requests: tuple[Standing, ...]
    arrived: Numbers
    waiting: Numbers
    running: Numbers
    loads: tuple[tuple[int, int, Numbers], ...]
    saves: tuple[Pieces, ...]
    free: Numbers
    references: Numbers
    names: tuple[bytes | None, ...]
    copies: tuple[Numbers, ...]  # blocks of one name, in the order in which they are found
    plan: tuple[tuple[int, int, int, int, bool], ...] | None


class Snapshot(NamedTuple):
    """``logs`` is history: carried along and checked.

    Of it only how often each position ran (never, once, again) is a part of the key.
    """

    core: Core
    logs: tuple[Log, ...]

    def key(self) -> int:
        """Version 2 of marshal writes equal values as equal bytes."""
        times = tuple([bytes([min(count, 2) for count in log[2]]) for log in self.logs])
        packed = marshal.dumps((tuple(self.core), times), 2)
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "big")

    def pack(self) -> bytes:
        return marshal.dumps((tuple(self.core), self.logs), 2)


def unpack(packed: bytes) -> Snapshot:
    core, logs = marshal.loads(packed)
    return Snapshot(Core(*core), logs)


class World:
    """A scheduler, its pool's contents, and what is under way outside."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scheduler = Scheduler(case.limits, NAMING, self.answer, self.cancel)
        self.slots = [[RUBBISH] * case.limits.block_size for _ in range(case.limits.num_blocks)]
        self.lives = [0] * len(case.orders)
        self.executed = [bytearray(len(truth)) for truth in case.truth]  # times, by position
        self.first: list[Hits | None] = [None] * len(case.orders)
        self.pieces: dict[tuple[str, int, int], Pieces] = {}
        self.plan: Plan | None = None
        self.script: tuple[int | None, ...] = ()
        self.asked: list[tuple[str, int | None]] = []
        self.cancels: dict[tuple[str, int], int] = {}  # loads given up: 1 if that ended them

    def answer(self, query: Query) -> int | None:
        """What the store says: the script's next line, then the first of the case's answers."""
        size = self.case.limits.block_size
        named = takewhile(set(self.scheduler.pool.names).__contains__, query.names)
        local = min(len(list(named)), (len(query.tokens) - 1) // size) * size
        assert query.local == local, (query, local)
        said = self._next(self.case.answers[0])
        self.asked.append((query.request_id, said))
        return said

    def cancel(self, request_id: str, epoch: int) -> bool:
        """Whether the store can give up a load at once: the script's next line, then not."""
        key = request_id, epoch
        assert key in self.scheduler.loads, key
        assert key not in self.cancels, key
        self.cancels[key] = int(bool(self._next(0)))
        return self.cancels[key] == 1

    def _next(self, default: int | None) -> int | None:
        """The next line of the script. In a step all cancels come before the first lookup."""
        place = len(self.asked) + len(self.cancels)
        return self.script[place] if place < len(self.script) else default

    def note_saves(self, saves: tuple[Save, ...]) -> None:
        for save in saves:
            self.pieces[save.request_id, save.epoch, save.serial] = tuple(
                (piece.block, piece.name, len(piece.tokens)) for piece in save.contents
            )

    # --- copies ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        scheduler, pool, case = self.scheduler, self.scheduler.pool, self.case
        requests = [scheduler.requests.get(order.request_id) for order in case.orders]
        saves = sorted([self.pieces[key] for key in scheduler.saves], key=_what_is_saved)
        block, epoch, loads = self._rename(requests, saves)
        back = sorted(block, key=block.__getitem__)
        core = Core(
            tuple(
                lives
                if request is None
                else (
                    *_standing(lives, request, first, block, epoch),
                    self._given_up(request, epoch),
                    self._named(request),
                )
                for lives, request, first in zip(self.lives, requests, self.first, strict=True)
            ),
            tuple([case.indexes[request_id] for request_id in scheduler.requests]),
            tuple([case.indexes[request.id] for request in scheduler.waiting]),
            tuple([case.indexes[request.id] for request in scheduler.running]),
            tuple([(i, epoch[age], tuple([block[b] for b in held])) for i, age, held in loads]),
            tuple([tuple([(block[b], n, c) for b, n, c in pieces]) for pieces in saves]),
            tuple([block[old] for old in pool.free]),
            tuple([pool.references[old] for old in back]),
            tuple([pool.names[old] for old in back]),
            tuple(
                [
                    tuple([block[old] for old in (pool.by_name[name], *pool.copies[name])])
                    for name in sorted(pool.copies)
                ]
            ),
            None
            if self.plan is None
            else tuple([self._entry(e, epoch) for e in self.plan.entries]),
        )
        return Snapshot(core, tuple(map(self._log, range(len(requests)), requests)))

    def _given_up(self, request: Request, epoch: dict[int, int]) -> int:
        still_loads = (request.id, request.given_up) in self.scheduler.loads
        return epoch[request.given_up] if still_loads else 0

    def _named(self, request: Request) -> int:
        """Only where the queue is named in pieces does it matter how far that has come."""
        pieces = self.case.limits.names_per_step < request.length
        return len(request.names) if pieces else 0

    def _rename(
        self, requests: list[Request | None], saves: list[Pieces]
    ) -> tuple[dict[int, int], dict[int, int], list[tuple[int, int, Numbers]]]:
        """New numbers for blocks and epochs, by place alone; and the loads in an order by place."""
        block = {old: new for new, old in enumerate(self.scheduler.pool.free)}
        epoch: dict[int, int] = {}
        for request in requests:
            if request is not None and request.residency is not None:
                epoch.setdefault(request.residency.admission.epoch, len(epoch) + 1)
                for old in request.residency.blocks:
                    block.setdefault(old, len(block))
        loads = sorted(
            (self.case.indexes[request_id], age not in epoch, len(blocks), age, blocks)
            for (request_id, age), blocks in self.scheduler.loads.items()
        )
        for _, _, _, age, blocks in loads:
            epoch.setdefault(age, len(epoch) + 1)
            for old in blocks:
                block.setdefault(old, len(block))
        for pieces in saves:
            for old, _, _ in pieces:
                block.setdefault(old, len(block))
        for old in range(self.case.limits.num_blocks):
            block.setdefault(old, len(block))
        return block, epoch, [(index, age, blocks) for index, _, _, age, blocks in loads]

    def _entry(self, entry: Entry, epoch: dict[int, int]) -> tuple[int, int, int, int, bool]:
        index = self.case.indexes[entry.request.id]
        if self.scheduler.requests.get(entry.request.id) is not entry.request:
            index = -1
        return index, epoch.get(entry.epoch, 0), entry.start, entry.count, entry.samples

    def _log(self, index: int, request: Request | None) -> Log:
        if request is None:
            return 0, 0, b"", ()
        runs = [
            (run.admission.length, run.admission.local, run.admission.external, run.frontier)
            for run in request.runs
        ]
        return len(request.names), request.failed, bytes(self.executed[index]), tuple(runs)

    @classmethod
    def restore(cls, case: Case, snapshot: Snapshot) -> World:
        world, core = cls(case), snapshot.core
        scheduler = world.scheduler
        for index, standing in enumerate(core.requests):
            if isinstance(standing, int):
                world.lives[index] = standing
        for index in core.arrived:
            world._stand(index, core.requests[index], snapshot.logs[index])
        ids = [order.request_id for order in case.orders]
        scheduler.waiting.extend([scheduler.requests[ids[index]] for index in core.waiting])
        scheduler.waiting_tokens = sum([request.length for request in scheduler.waiting])
        scheduler.running.extend([scheduler.requests[ids[index]] for index in core.running])
        world._hold(core)
        if core.plan is not None:
            world._replan(core.plan)
        for request in scheduler.waiting:  # it remembers what it found before the next event
            most = (request.length - 1) // case.limits.block_size
            scheduler.pool.leading(request.names, most, request.found)
        return world

    def _hold(self, core: Core) -> None:
        """Loads, saves and the pool, with what saved and named blocks hold."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        for index, epoch, blocks in core.loads:
            scheduler.loads[self.case.orders[index].request_id, epoch] = blocks
            scheduler._epoch = max(scheduler._epoch, epoch)
        for serial, pieces in enumerate(core.saves):
            self.pieces["saved", 0, serial] = pieces
            scheduler.saves["saved", 0, serial] = tuple([block for block, _, _ in pieces])
            for block, name, count in pieces:
                self.slots[block][:count] = contents(name, count)
        scheduler._serial = len(core.saves)
        pool.free.clear()
        pool.free.update(dict.fromkeys(core.free))
        pool.references[:] = core.references
        pool.names[:] = core.names
        for block, known in enumerate(core.names):
            if known is not None:
                pool.by_name[known] = block
                self.slots[block][:] = contents(known, self.case.limits.block_size)
        for first, *others in core.copies:
            shared = core.names[first]
            assert shared is not None
            pool.by_name[shared] = first
            pool.copies[shared] = others

    def _stand(self, index: int, standing: Standing, log: Log) -> None:
        assert not isinstance(standing, int)
        self.lives[index], code, length, lookups, self.first[index] = standing[:5]
        admitted, blocks, computed, given_up = standing[5:9]
        order, truth = self.case.orders[index], self.case.truth[index]
        names, failed, executed, runs = log
        self.executed[index][:] = executed
        size = self.case.limits.block_size
        self.scheduler._arrivals += 1
        request = Request(
            order,
            list(truth[:length]),
            self.scheduler._arrivals,
            [truth[:end] for end in range(size, names * size + 1, size)],
            STATES[code],
            None,
            [Run(Admission(n - len(runs), *run[:3]), run[3]) for n, run in enumerate(runs)],
            None,
            lookups,
            failed,
            given_up,
        )
        self.scheduler.requests[order.request_id] = request
        if admitted is not None:
            request.residency = Residency(Admission(*admitted), list(blocks), computed)
            self.scheduler._epoch = max(self.scheduler._epoch, admitted[0])
            self.write(index, request.residency.blocks, 0, computed)

    def _replan(self, plan: tuple[tuple[int, int, int, int, bool], ...]) -> None:
        """The plan under way; what it computes stands in the slots, what was aborted does not."""
        entries = []
        for index, epoch, start, count, samples in plan:
            order = self.case.orders[index]
            request = self.scheduler.requests.get(order.request_id) if index >= 0 else None
            if request is None:
                request = Request(order, list(order.tokens), state=RequestState.FINISHED)
            entries.append(Entry(request, epoch, start, count, samples))
            if request.residency is not None:
                self.write(index, request.residency.blocks, start, start + count)
        self.plan = self.scheduler._plan = Plan(tuple(entries), (), (), ())

    def write(self, index: int, blocks: list[int], start: int, stop: int) -> None:
        """The true KV of positions ``[start, stop)`` of an order."""
        size, truth = self.case.limits.block_size, self.case.truth[index]
        for position in range(start, stop):
            self.slots[blocks[position // size]][position % size] = truth[: position + 1]


def _what_is_saved(pieces: Pieces) -> list[tuple[bytes, int]]:
    return [(name, count) for _, name, count in pieces]


def _standing(
    lives: int,
    request: Request,
    first: Hits | None,
    block: dict[int, int],
    epoch: dict[int, int],
) -> tuple[int, int, int, int | None, Hits | None, Admitted | None, Numbers, int]:
    residency = request.residency
    stands = lives, CODES[request.state], request.length, request.lookups_left, first
    if residency is None:
        return (*stands, None, (), 0)
    admission, blocks = residency.admission, tuple([block[old] for old in residency.blocks])
    admitted = epoch[admission.epoch], admission.length, admission.local, admission.external
    return (*stands, admitted, blocks, residency.computed)
