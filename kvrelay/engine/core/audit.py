"""The invariants of the accounting, checked between two steps; docs/accounting.md numbers them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.engine.core.request import Request, RequestState
from kvrelay.engine.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken invariant; ``request_id`` is ``None`` where no single request is to blame."""

    invariant: str
    request_id: str | None
    message: str


def audit(scheduler: Scheduler) -> list[Finding]:
    """Everything that is wrong; empty when nothing is."""
    findings = list(_strangers(scheduler))
    if findings:
        return findings  # the rest is about blocks
    findings += _references(scheduler)
    findings += _names(scheduler)
    findings += _tables(scheduler)
    for request in scheduler.requests.values():
        findings += _request(scheduler, request)
    findings += _queues(scheduler)
    return findings


def _strangers(scheduler: Scheduler) -> Iterator[Finding]:
    """I1: every number that is written down as a block is one."""
    pool, size = scheduler.pool, len(scheduler.pool.references)
    held = [*_held(scheduler)]
    held += [(block, None, "the free list") for block in pool.free]
    held += [(block, None, "the names") for block in pool.by_name.values()]
    for block, request_id, who in held:
        if not 0 <= block < size:
            yield Finding("I1", request_id, f"{who} has block {block}, and the pool {size}")


def _held(scheduler: Scheduler) -> Iterator[tuple[int, str | None, str]]:
    """Every block with who may read or write it: the request, and in words."""
    for request in scheduler.requests.values():
        for block in request.residency.blocks if request.residency is not None else ():
            yield block, request.id, f"request {request.id}"
    for what, jobs in (("load", scheduler.loads), ("save", scheduler.saves)):
        for key, blocks in jobs.items():
            for block in blocks:
                yield block, key[0], f"{what} of {key[0]}"


def _references(scheduler: Scheduler) -> Iterator[Finding]:
    """I1: references of a block are its holders; what nobody holds is free, and nothing else."""
    pool, holders = scheduler.pool, defaultdict[int, list[str]](list)
    for block, _, who in _held(scheduler):
        holders[block].append(who)
    for block, references in enumerate(pool.references):
        told = holders[block]
        if references != len(told):
            message = f"block {block} counts {references} holders and has {len(told)}: {told}"
            yield Finding("I1", None, message)
        if (block in pool.free) != (references == 0):
            filed = "is filed as free" if block in pool.free else "is not filed as free"
            yield Finding("I1", None, f"block {block} has {references} holders and {filed}: {told}")


def _names(scheduler: Scheduler) -> Iterator[Finding]:
    """I4: names and blocks agree; a block with an outside writer is neither free nor named."""
    pool = scheduler.pool
    for name, block in pool.by_name.items():
        if pool.names[block] != name:
            yield Finding("I4", None, f"block {block} is found by a name it does not carry")
    if sum(name is not None for name in pool.names) != len(pool.by_name):
        yield Finding("I4", None, "a block carries a name it is not found by")
    for (request_id, _), blocks in scheduler.loads.items():
        for block in blocks:
            if block in pool.free or pool.names[block] is not None:
                yield Finding(
                    "I4", request_id, f"block {block} is written from outside and visible"
                )


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


def _tables(scheduler: Scheduler) -> Iterator[Finding]:
    """I1: a block stands once in a table, and one that is not full yet in no other table. I4: what
    is full has the name of its tokens or none, what is not has none (D6)."""
    pool, size = scheduler.pool, scheduler.limits.block_size
    residents = [request for request in scheduler.requests.values() if request.residency]
    shares = Counter(block for request in residents for block in request.resident.blocks)
    for request in residents:
        blocks, full = request.resident.blocks, request.resident.computed // size
        if len(set(blocks)) != len(blocks):
            yield Finding("I1", request.id, f"a block twice in {blocks}")
        for block in blocks[full:]:
            if shares[block] > 1:
                yield Finding("I1", request.id, f"block {block} is written and in another table")
        for index, block in enumerate(blocks):
            wanted = request.names[index] if index < min(full, len(request.names)) else None
            if pool.names[block] not in (None, wanted):
                of = f"positions {index * size} to {(index + 1) * size - 1}, {full * size} are full"
                yield Finding("I4", request.id, f"block {block} has a name not its own: {of}")


def _queues(scheduler: Scheduler) -> Iterator[Finding]:
    """I8, its half that can be seen at rest: every request stands in the one place of its state."""
    for request in scheduler.waiting:
        if (
            request.state is not RequestState.WAITING
            or scheduler.requests.get(request.id) is not request
        ):
            yield Finding("I8", request.id, f"waits in the queue and is {request.state}")
    for request in scheduler.running:
        if (
            request.state is not RequestState.RUNNING
            or scheduler.requests.get(request.id) is not request
        ):
            yield Finding("I8", request.id, f"stands among the running and is {request.state}")
    for queue in (scheduler.waiting, scheduler.running):
        for before, request in pairwise(queue):
            if before.arrival > request.arrival:
                yield Finding("I8", request.id, f"stands behind {before.id}, which came later")
    for request in scheduler.requests.values():
        epoch = request.residency.admission.epoch if request.residency else None
        if request.state is RequestState.LOADING and (request.id, epoch) not in scheduler.loads:
            yield Finding("I8", request.id, "waits for a load that nobody carries out")
    states = Counter(request.state for request in scheduler.requests.values())
    if (states[RequestState.WAITING], states[RequestState.RUNNING]) != (
        len(scheduler.waiting),
        len(scheduler.running),
    ):
        yield Finding(
            "I8", None, f"queues of {len(scheduler.waiting)} and {len(scheduler.running)}"
        )
