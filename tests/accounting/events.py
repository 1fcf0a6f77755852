"""Every event that can befall a world, carried out on it, with what must hold after each."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.engine.core.external import Load
from kvrelay.engine.core.journal import is_empty
from kvrelay.engine.core.plan import Plan
from kvrelay.engine.core.request import Finish, Request, RequestState
from kvrelay.engine.core.usage import leg_tokens
from tests.accounting.case import RUBBISH, contents
from tests.accounting.world import STATES, Snapshot, World

Event = tuple[str, tuple[int | None, ...]]
Keys = set[tuple[str, int]]


class Broken(AssertionError):
    """An invariant does not hold."""


def expect(holds: bool, *what: object) -> None:
    if not holds:
        raise Broken(*what)


def successors(snapshot: Snapshot, blank: World) -> Iterator[tuple[Event, World]]:
    """Every event that is possible here, and the world after it."""
    for event in _simple(snapshot, blank):
        world = World.restore(blank.case, snapshot)
        carry_out(world, event)
        yield event, world
    if snapshot.core.plan is None:
        yield from _schedules(snapshot, blank)


def _simple(snapshot: Snapshot, blank: World) -> Iterator[Event]:
    case, core = blank.case, snapshot.core
    for index, standing in enumerate(core.requests):
        if not isinstance(standing, int):
            yield "abort", (index,)
            if STATES[standing[1]] is RequestState.LOADING:
                yield "abort", (index, 1)
        elif standing < case.lives:
            yield "submit", (index,)
    for place, (index, epoch, _) in enumerate(core.loads):
        standing = core.requests[index]
        alive = not isinstance(standing, int) and standing[5] and standing[5][0] == epoch
        for valid in case.shorts if alive else (99,):
            yield "loaded", (place, valid)
    for place in range(len(core.saves)):
        yield "saved", (place,)
    if core.plan is not None:
        yield "commit", ()
        yield "discard", ()


def _schedules(snapshot: Snapshot, blank: World) -> Iterator[tuple[Event, World]]:
    """A step for every combination of answers its lookups may get, found as they are asked."""
    scripts: list[tuple[int | None, ...]] = [()]
    while scripts:
        script = scripts.pop()
        world = World.restore(blank.case, snapshot)
        event = carry_out(world, ("schedule", script))
        if world.plan is not None and is_empty(world.plan):
            trace = world.snapshot().core._replace(plan=None) != snapshot.core
            expect(not trace, "an empty step leaves a trace", event)
        yield event, world
        for place in range(len(script), len(event[1])):
            others = (1,) if place < len(world.cancels) else blank.case.answers[1:]
            scripts += [(*event[1][:place], other) for other in others]


def carry_out(world: World, event: Event) -> Event:
    """Do it and check; a schedule comes back with the answers that were asked for."""
    kind, numbers = event
    open_before, waited_before = set(world.scheduler.loads), _waited(world)
    if kind == "schedule":
        world.script = numbers
        _schedule(world)
        event = kind, (*world.cancels.values(), *(said for _, said in world.asked))
    elif kind == "commit":
        _commit(world)
    elif kind == "discard":
        world.scheduler.discard()
        world.plan = None
    elif kind == "loaded":
        _load_ends(world, numbers[0] or 0, numbers[1] or 0)
    elif kind == "saved":
        world.scheduler.saved(*list(world.scheduler.saves)[numbers[0] or 0])
    else:
        world.script = numbers[1:]
        _come_or_go(world, kind, numbers[0] or 0)
    if kind != "loaded":
        _check_cancels(world, open_before, waited_before)
    check(world)
    return event


def _check_cancels(world: World, open_before: Keys, waited_before: Keys) -> None:
    """Each load that nobody waits for any more is cancelled once; it ends now, or by its event."""
    ended = {key for key, said in world.cancels.items() if said}
    expect(open_before - set(world.scheduler.loads) == ended, "other loads have ended", ended)
    expect(waited_before - _waited(world) == set(world.cancels), "not cancelled", world.cancels)


def _waited(world: World) -> Keys:
    """The loads that requests wait for."""
    return {
        (request.id, request.resident.admission.epoch)
        for request in world.scheduler.requests.values()
        if request.state is RequestState.LOADING
    }


def _come_or_go(world: World, kind: str, index: int) -> None:
    order = world.case.orders[index]
    if kind == "submit":
        world.lives[index] += 1
        world.scheduler.submit(order)
        return
    request = world.scheduler.requests[order.request_id]
    world.scheduler.abort(order.request_id)
    _ended(world, request, Finish.ABORT)


def _schedule(world: World) -> None:
    scheduler, limits = world.scheduler, world.case.limits
    queue = [request.id for request in scheduler.waiting]
    held = {request.id for request in scheduler.requests.values() if request.residency}
    world.plan = plan = scheduler.schedule()
    world.note_saves(plan.saves)
    residents = len(scheduler.running) + scheduler.loading
    expect(residents <= limits.max_num_seqs, "too many residents", residents)
    total = sum(entry.count for entry in plan.entries)
    expect(total <= limits.max_num_batched_tokens, "over budget", plan)
    expect(all(load.external > 0 for load in plan.loads), "an empty load", plan)
    _check_order(world, queue, held)
    _check_preempted(world, plan, held)
    _execute(world, plan)
    for load in plan.loads:
        _check_load(world, load)


def _check_order(world: World, queue: list[str], held: set[str]) -> None:
    """First come, first served: who is passed over was told to ask later."""
    said = dict(world.asked)
    passed = False
    for request_id in queue:
        if world.scheduler.requests[request_id].residency is None:
            request = world.scheduler.requests[request_id]
            later = request_id in said and said[request_id] is None
            later = later or (request_id, request.given_up) in world.scheduler.loads
            passed = passed or not later
        else:
            expect(not passed, "overtaken by", request_id, queue, said)
    for request_id, _ in world.asked:
        request = world.scheduler.requests[request_id]
        expect(request_id not in held, "a resident asks the store", request_id)
        expect(request.lookups_left is None or request.lookups_left <= 1, "asks too often", request)


def _check_preempted(world: World, plan: Plan, held: set[str]) -> None:
    """The newest residents are preempted, whether others run or load; none comes at once after."""
    requests = world.scheduler.requests
    residents = [requests[request_id] for request_id in held if requests[request_id].residency]
    for request in plan.preempted:
        older = all(other.arrival < request.arrival for other in residents)
        expect(older, "preempted before a newer one", request, residents)
        expect(request.residency is None and not plan.loads, "admitted in this step", plan)


def _execute(world: World, plan: Plan) -> None:
    """The runner: every entry's positions are written, in its own blocks, from where it stands."""
    seen: set[str] = set()
    for entry in plan.entries:
        request, residency = entry.request, entry.request.resident
        expect(
            request.state is RequestState.RUNNING and request.id not in seen, "wrong entry", entry
        )
        expect(entry.start == residency.computed and entry.count > 0, "wrong range", entry)
        expect(
            entry.samples == (entry.start + entry.count == request.length), "wrong sample", entry
        )
        expect(entry.start + entry.count <= request.length, "past the end", entry)
        world.write(
            world.case.indexes[request.id], residency.blocks, entry.start, entry.start + entry.count
        )
        seen.add(request.id)


def _check_load(world: World, load: Load) -> None:
    """The destination is just the request's own blocks of the range."""
    request, size = world.scheduler.requests[load.request_id], world.case.limits.block_size
    stop = load.local + load.external
    expect(stop < request.length and load.local % size == 0, "a load too long", load)
    blocks = request.resident.blocks[load.local // size : -(-stop // size)]
    expect(list(load.blocks) == blocks, "a load elsewhere", load, blocks)


def _commit(world: World) -> None:
    scheduler, plan = world.scheduler, world.plan
    assert plan is not None
    sampled: list[int | None] = []
    for entry in plan.entries:
        index = world.case.indexes[entry.request.id]
        sampled.append(world.case.truth[index][entry.request.length] if entry.samples else None)
        if scheduler.requests.get(entry.request.id) is entry.request:
            for position in range(entry.start, entry.start + entry.count):
                world.executed[index][position] += 1
    before = [(entry.request, entry.request.state) for entry in plan.entries]
    world.note_saves(scheduler.commit(plan, sampled).saves)
    world.plan = None
    for request, state in before:
        if request.state is RequestState.FINISHED and state is not RequestState.FINISHED:
            _ended(world, request, request.finish)


def _load_ends(world: World, place: int, valid: int) -> None:
    """The leading ``valid`` tokens are written, and just as many count, if anybody still waits."""
    request_id, epoch = list(world.scheduler.loads)[place]
    request = world.scheduler.requests.get(request_id)
    if request is None or request.residency is None or request.resident.admission.epoch != epoch:
        got = world.scheduler.loaded(request_id, epoch, valid)
        expect(got is None, "a dead load is heard", request_id)
        return
    admission, lookups = request.resident.admission, request.lookups_left
    written = admission.local + min(max(valid, 0), admission.external)
    index = world.case.indexes[request_id]
    world.write(index, request.resident.blocks, admission.local, written)
    got = world.scheduler.loaded(request_id, epoch, valid)
    expect(got is request, "a load is not heard", request)
    expect(request.resident.computed == written, "loaded wrongly", request, written)
    claimed = request.resident.admission.external
    expect(claimed == written - admission.local, "a claim stands", request)
    if lookups is not None:
        expect(request.lookups_left == lookups, "a failed load earns lookups", request)
    else:
        failed = written < admission.local + admission.external
        expect(request.lookups_left == (1 if failed else None), "lookups", request)


def _ended(world: World, request: Request, finish: Finish | None) -> None:
    """I5, I6 and what the account means, for one that has just ended."""
    index, account = world.case.indexes[request.id], leg_tokens(request)
    truth = world.case.truth[index]
    expect(bytes(request.tokens) == truth[: request.length], "wrong tokens", request)
    times, first = world.executed[index], world.first[index]
    expect(account.executed == sum(times), "I5", account, times)
    again = sum(count - 1 for count in times if count)
    expect(account.recomputed == again, "recomputed is not executed less distinct", account, times)
    hits = account.local, account.external
    expect(hits == (first or (0, 0)), "hits are not those of an undisturbed run", account, first)
    expect(min(account.recomputed, account.failed, account.computed) >= 0, "negative", account)
    times[:] = bytes(len(times))
    world.first[index] = None
    if finish is Finish.ABORT:
        return
    parts = account.local + account.external + account.computed
    expect(parts == account.length and account.computed > 0, "I6", account)
    made = request.tokens[account.length :]
    stops = [place for place, token in enumerate(made, 1) if token in request.order.ending]
    most = request.order.prompt_len + request.order.max_tokens - account.length
    right = 1 if request.order.prefill_only else min([most, *stops])
    expect(len(made) == account.generated == right, "ended early or late", account)


def check(world: World) -> None:
    """What every slot must hold, and I5 of those under way."""
    scheduler, case, slots = world.scheduler, world.case, world.slots
    pool, size = scheduler.pool, case.limits.block_size
    for blocks in scheduler.loads.values():
        for block in blocks:
            slots[block] = [RUBBISH] * size  # at any moment, until its event is there
    for block, name in enumerate(pool.names):
        if name is not None:
            found = [pool.by_name.get(name), *pool.copies.get(name, [])]
            expect(block in found, "a name astray", block, name)
            expect(slots[block] == contents(name, size), "a name lies", block, name, slots[block])
    for index, order in enumerate(case.orders):
        request = scheduler.requests.get(order.request_id)
        if request is not None:
            _check_request(world, index, request)
    for key in scheduler.saves:
        for block, name, count in world.pieces[key]:
            expect(slots[block][:count] == contents(name, count), "a save reads wrong", key, name)


def _check_request(world: World, index: int, request: Request) -> None:
    account = sum([run.executed for run in request.runs])
    residency = request.residency
    if world.first[index] is None and request.state is RequestState.RUNNING:
        admission = request.resident.admission
        world.first[index] = admission.local, admission.external
    if residency is not None:
        truth, size = world.case.blocks[index], world.case.limits.block_size
        left = residency.computed
        for block, expected in zip(residency.blocks, truth, strict=False):
            if left <= 0:
                break
            expect(world.slots[block][:left] == expected[:left], "reads wrong KV", request)
            left -= size
        expect(left <= 0, "computed beyond its blocks", request)
        if request.state is RequestState.RUNNING:
            account += residency.computed - residency.admission.hit
    expect(account == sum(world.executed[index]), "I5", request, account, world.executed[index])
