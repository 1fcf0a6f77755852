"""The invariants of the accounting, checked between two steps; docs/accounting.md numbers them.

Checks of every block of the pool first ask for all of them at once, without a loop in Python: an
audit of each step is affordable then. Only where that fails do they look for the block.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from kvrelay.engine.core.blocks import LeadingRun
from kvrelay.engine.core.request import Request, RequestState
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.engine.core.usage import leg_tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken invariant; ``request_id`` is ``None`` if it is not about a single request."""

    invariant: str
    request_id: str | None
    message: str


def audit(scheduler: Scheduler) -> list[Finding]:
    """All broken invariants; empty if there are none."""
    findings = list(_unknown_blocks(scheduler))
    if findings:
        return findings  # the other checks look these blocks up
    findings += _references(scheduler)
    findings += _names(scheduler)
    findings += _found(scheduler)
    findings += _tables(scheduler)
    for request in scheduler.requests.values():
        findings += _request(scheduler, request)
        findings += _account(request)
    findings += _queues(scheduler)
    return findings


def _unknown_blocks(scheduler: Scheduler) -> Iterator[Finding]:
    """I1: every block number is one of the pool's."""
    pool, size = scheduler.pool, len(scheduler.pool.references)
    seen = {*_held_blocks(scheduler), *pool.free, *pool.by_name.values(), *_copies(scheduler)}
    if not seen or 0 <= min(seen) <= max(seen) < size:
        return
    held = [*_held(scheduler)]
    held += [(block, None, "the free list") for block in pool.free]
    held += [(block, None, "the names") for block in pool.by_name.values()]
    held += [(block, None, "a copy") for block in _copies(scheduler)]
    for block, request_id, holder in held:
        if not 0 <= block < size:
            yield Finding("I1", request_id, f"{holder} has block {block} of {size}")


def _held(scheduler: Scheduler) -> Iterator[tuple[int, str | None, str]]:
    """Every referenced block, with the request and the name of the holder."""
    for request in scheduler.requests.values():
        for block in request.residency.blocks if request.residency is not None else ():
            yield block, request.id, f"request {request.id}"
    for what, jobs in (("load", scheduler.loads), ("save", scheduler.saves)):
        for key, blocks in jobs.items():
            for block in blocks:
                yield block, key[0], f"{what} of {key[0]}"


def _held_blocks(scheduler: Scheduler) -> Iterator[int]:
    """Every referenced block, once for each holder."""
    tables = (one.residency.blocks for one in scheduler.requests.values() if one.residency)
    return chain.from_iterable((*tables, *scheduler.loads.values(), *scheduler.saves.values()))


def _copies(scheduler: Scheduler) -> Iterator[int]:
    """The blocks that have a name in common with the one found by it."""
    return chain.from_iterable(scheduler.pool.copies.values())


def _references(scheduler: Scheduler) -> Iterator[Finding]:
    """I1: a block has as many references as holders; only blocks without holders are free."""
    pool = scheduler.pool
    counts = [0] * len(pool.references)
    for block in _held_blocks(scheduler):
        counts[block] += 1
    free = len(pool.free) == counts.count(0) and not any(map(counts.__getitem__, pool.free))
    if free and counts == pool.references:
        return
    holders = defaultdict[int, list[str]](list)
    for block, _, holder in _held(scheduler):
        holders[block].append(holder)
    for block, references in enumerate(pool.references):
        held = holders[block]
        if references != len(held):
            message = f"block {block} has {references} references and {len(held)} holders: {held}"
            yield Finding("I1", None, message)
        if (block in pool.free) != (references == 0):
            state = "free" if block in pool.free else "not free"
            message = f"block {block} has {references} references and is {state}: {held}"
            yield Finding("I1", None, message)


def _names(scheduler: Scheduler) -> Iterator[Finding]:
    """I4: names and blocks agree; a block that a load writes is neither free nor named.

    Only held blocks have a name in common, and one of them is found by it.
    """
    pool = scheduler.pool
    found = [*pool.by_name.values(), *_copies(scheduler)]
    if pool.copies or [*map(pool.names.__getitem__, found)] != [*pool.by_name]:
        named = [*pool.by_name.items()]
        named += [(name, block) for name, blocks in pool.copies.items() for block in blocks]
        for name, block in named:
            if pool.names[block] != name:
                yield Finding("I4", None, f"block {block} is found by a name that it does not have")
            if name in pool.copies and block in pool.free:
                yield Finding("I4", None, f"block {block} is free and a copy of a held block")
    if len({*found}) != len(pool.names) - pool.names.count(None):
        yield Finding("I4", None, "a block has a name that does not find it")
    if not pool.copies.keys() <= pool.by_name.keys():
        yield Finding("I4", None, "a name of copies does not find any of them")
    for (request_id, _), blocks in scheduler.loads.items():
        for block in blocks:
            if block in pool.free or pool.names[block] is not None:
                yield Finding("I4", request_id, f"block {block} is written by a load and visible")


def _found(scheduler: Scheduler) -> Iterator[Finding]:
    """D3: what a waiting request remembers to have found is what a walk through its names finds."""
    pool = scheduler.pool
    for request in scheduler.waiting:
        run, most = request.found, (request.length - 1) // scheduler.limits.block_size
        copy = LeadingRun(dict(run.places), run.losses)
        remembered = pool.leading(request.names, most, copy)
        if remembered != (walked := pool.leading(request.names, most, LeadingRun())):
            yield Finding("D3", request.id, f"blocks {remembered} remembered, {walked} found")


def _request(scheduler: Scheduler, request: Request) -> Iterator[Finding]:
    """I2 and I3."""
    residency, size = request.residency, scheduler.limits.block_size
    if (residency is None) != (request.state in (RequestState.WAITING, RequestState.FINISHED)):
        yield Finding("I2", request.id, f"{request.state} with residency {residency}")
    if residency is None:
        return
    admission, computed = residency.admission, residency.computed
    if not 0 <= computed <= len(residency.blocks) * size:
        yield Finding("I2", request.id, f"{computed} computed in {len(residency.blocks)} blocks")
    elif request.state is RequestState.LOADING and computed != admission.local:
        yield Finding("I2", request.id, f"{computed} computed, loading after {admission.local}")
    if request.state is RequestState.RUNNING and computed > request.length - 1:
        yield Finding("I2", request.id, f"{computed} computed of {request.length}: no work left")
    if min(admission.local, admission.external, admission.fresh - 1) < 0:
        yield Finding("I3", request.id, f"{admission}")
    if request.state is RequestState.RUNNING and computed < admission.hit:
        yield Finding("I3", request.id, f"{computed} computed, {admission.hit} admitted")


def _account(request: Request) -> Iterator[Finding]:
    """I5 and I6: what the account says, against the positions of every run, one by one."""
    account, runs = leg_tokens(request), request.all_runs
    spans = [range(run.admission.hit, run.frontier) for run in runs]
    executed = sum(map(len, spans))
    again = executed - len(set(chain(*spans))) if len(spans) > 1 else 0
    if (account.executed, account.recomputed) != (executed, again):
        message = f"{executed} positions executed, {again} of them again: {account}"
        yield Finding("I5", request.id, message)
    if any(before.admission.epoch >= run.admission.epoch for before, run in pairwise(runs)):
        yield Finding("I6", request.id, f"the runs are not in the order of their epochs: {runs}")
    hits = (runs[0].admission.local, runs[0].admission.external) if runs else (0, 0)
    if (account.local, account.external) != hits:
        message = f"the first admission found {hits}, hits besides are its own work: {account}"
        yield Finding("I6", request.id, message)


def _tables(scheduler: Scheduler) -> Iterator[Finding]:
    """I1 and I4 (D6) of block tables.

    A block is in a table at most once, and a block that is not full in no other table. A full block
    has the name of its tokens; one that is not full has none.
    """
    pool, size = scheduler.pool, scheduler.limits.block_size
    residents = [request for request in scheduler.requests.values() if request.residency]
    shares = Counter(chain.from_iterable(request.resident.blocks for request in residents))
    for request in residents:
        blocks, full = request.resident.blocks, request.resident.computed // size
        if len(set(blocks)) != len(blocks):
            yield Finding("I1", request.id, f"a block twice in {blocks}")
        for block in blocks[full:]:
            if shares[block] > 1:
                yield Finding("I1", request.id, f"block {block} is written and in another table")
        named: list[bytes | None] = [*request.names[:full]]
        named += [None] * (len(blocks) - len(named))
        if [*map(pool.names.__getitem__, blocks)] == named:
            continue
        for index, (block, name) in enumerate(zip(blocks, named, strict=False)):
            if pool.names[block] != name:
                of = f"positions {index * size} to {(index + 1) * size - 1}, {full * size} are full"
                yield Finding(
                    "I4", request.id, f"block {block} lacks the name of its content: {of}"
                )


def _queues(scheduler: Scheduler) -> Iterator[Finding]:
    """I8, as far as it can be seen at rest: every request is in the queue of its state."""
    for request in scheduler.waiting:
        if (
            request.state is not RequestState.WAITING
            or scheduler.requests.get(request.id) is not request
        ):
            yield Finding("I8", request.id, f"is in the waiting queue and {request.state}")
    for request in scheduler.running:
        if (
            request.state is not RequestState.RUNNING
            or scheduler.requests.get(request.id) is not request
        ):
            yield Finding("I8", request.id, f"is among the running and {request.state}")
    tokens = sum(request.length for request in scheduler.waiting)
    if scheduler.waiting_tokens != tokens:
        message = f"{tokens} tokens wait, {scheduler.waiting_tokens} are counted"
        yield Finding("I8", None, message)
    for queue in (scheduler.waiting, scheduler.running):
        for before, request in pairwise(queue):
            if before.arrival > request.arrival:
                yield Finding("I8", request.id, f"is queued behind {before.id}, which came later")
    for request in scheduler.requests.values():
        epoch = request.residency.admission.epoch if request.residency else None
        if request.state is RequestState.LOADING and (request.id, epoch) not in scheduler.loads:
            yield Finding("I8", request.id, "waits for a load that is not open")
    states = Counter(request.state for request in scheduler.requests.values())
    if (states[RequestState.WAITING], states[RequestState.RUNNING]) != (
        len(scheduler.waiting),
        len(scheduler.running),
    ):
        yield Finding(
            "I8", None, f"queues of {len(scheduler.waiting)} and {len(scheduler.running)}"
        )
