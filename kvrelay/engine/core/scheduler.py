"""Which positions the next step computes, and the accounting of blocks and tokens.

    submit -> schedule() -> Plan -> the runner -> commit(plan, sampled) -> schedule() ...
                  ^ loaded, saved, abort: at any moment between these calls

Pure: no clock, no thread. Numbers about cached tokens are read at the instant of admission and
frozen there; a refused attempt leaves no number behind. docs/accounting.md defines D1 to D6.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from kvrelay.engine.core.blocks import BlockPool, Naming
from kvrelay.engine.core.external import BlockContent, Load, Query, Save
from kvrelay.engine.core.foresight import NOTHING, Foreseen
from kvrelay.engine.core.plan import NO_TOKEN, Committed, EngineLimits, Entry, Output, Plan
from kvrelay.engine.core.request import Admission, Finish, Order, Request, RequestState, Residency
from kvrelay.engine.core.usage import computed_positions
from kvrelay.errors import Rejected

Lookup = Callable[[Query], int | None]
Cancel = Callable[[str, int], bool]


class Scheduler:
    """The requests of one worker and the block pool they share."""

    def __init__(
        self,
        limits: EngineLimits,
        naming: Naming,
        lookup: Lookup,
        cancel: Cancel = lambda request_id, epoch: False,
    ) -> None:
        self.limits = limits
        self.naming = naming
        self.pool = BlockPool(limits.num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.waiting_tokens = 0
        self.running: list[Request] = []
        self.loads: dict[tuple[str, int], tuple[int, ...]] = {}
        self.saves: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.late_events = 0
        self.preemptions = 0
        self._lookup = lookup
        self._cancel = cancel
        self._plan: Plan | None = None
        self._named = 0
        self._unnamed = False
        self._arrivals = 0
        self._epoch = 0
        self._serial = 0

    @property
    def loading(self) -> int:
        """The number of requests that wait for a load."""
        return len(self.requests) - len(self.waiting) - len(self.running)

    def submit(self, order: Order) -> Request:
        """Queue a request. Raises ``Rejected`` if it can never be served (D5)."""
        if order.request_id in self.requests:
            raise Rejected("request_id", f"{order.request_id!r} is being served here already")
        self.limits.check(order)
        self._arrivals += 1
        request = Request.of(order, self._arrivals)
        self.requests[request.id] = request
        self.waiting.append(request)
        self.waiting_tokens += request.length
        return request

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> Request | None:
        """End a request in any state. An unknown id is no error."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, finish)
        return request

    def schedule(self, foreseen: Foreseen = NOTHING) -> Plan:
        """The next step. Its ``commit`` comes before the next ``schedule``.

        ``foreseen`` are ``entries_ahead`` of the last plan, if that was committed: the step is the
        same without them, and takes longer to plan.
        """
        if self._plan is not None:
            raise RuntimeError("schedule() before commit() of the last plan")
        self._named = 0
        self._unnamed = False
        preempted, ready = self._make_room(foreseen)
        entries = self._share_budget(ready, foreseen)
        budget = self.limits.max_num_batched_tokens - sum(entry.count for entry in entries)
        admitted, loads, saves = self._admit(budget) if not preempted else ([], [], [])
        parts = tuple(entries + admitted), tuple(loads), tuple(saves), tuple(preempted)
        self._plan = Plan(*parts, self._named, self._unnamed)
        return self._plan

    def commit(self, plan: Plan, sampled: Sequence[int | None]) -> Committed:
        """Enter a step: each entry's token, ``NO_TOKEN``, or ``None`` if it does not sample."""
        if plan is not self._plan or len(sampled) != len(plan.entries):
            raise RuntimeError("commit() of a plan that is not the last one, or of another size")
        self._plan = None
        outputs: list[Output] = []
        saves: list[Save] = []
        executed = recomputed = 0
        for entry, token in zip(plan.entries, sampled, strict=True):
            if entry.request.resides(entry.epoch, RequestState.RUNNING):
                executed += entry.count
                stop = entry.start + entry.count
                recomputed += computed_positions(entry.request.runs, entry.start, stop)
                self._advance(entry, token, outputs, saves)
        return Committed(tuple(outputs), tuple(saves), executed, recomputed)

    def discard(self) -> Plan | None:
        """Drop the current plan: nothing of it was computed."""
        plan = self._plan
        self._plan = None
        return plan

    def loaded(self, request_id: str, epoch: int, valid: int) -> Request | None:
        """A load ended with ``valid`` leading tokens; returns its request, which now runs."""
        self.pool.drop(self.loads.pop((request_id, epoch), ()))
        request = self.requests.get(request_id)
        if request is None or not request.resides(epoch, RequestState.LOADING):
            self.late_events += 1
            return None
        self._settle(request, valid)
        return request

    def saved(self, request_id: str, epoch: int, serial: int) -> None:
        """A save ended: drop its references, even if the request has ended."""
        blocks = self.saves.pop((request_id, epoch, serial), None)
        if blocks is None:
            self.late_events += 1
        else:
            self.pool.drop(blocks)

    # --- schedule -------------------------------------------------------------------------------

    def _make_room(self, foreseen: Foreseen) -> tuple[list[Request], list[Request]]:
        """Give every running request its blocks, oldest first; preempt the newest for them.

        The newest resident is preempted, whether it runs or loads; only the newest itself waits.
        A load that cannot be cancelled keeps its blocks until it ends: after one, all that lack
        blocks wait for the next step. Returns the preempted requests and those that can compute.
        """
        preempted: list[Request] = []
        ready: list[Request] = []
        returned = True
        for request in tuple(self.running):
            if request in preempted:
                break  # and so are all newer ones
            missing = 0
            if request not in foreseen:
                missing = request.need(request.work, self.limits.block_size)
            while missing > len(self.pool.free) and returned:
                newest = max(self._residents())
                if newest is request:
                    break
                returned = self._preempt(newest)
                preempted.append(newest)
            if missing <= len(self.pool.free):
                request.resident.blocks += self.pool.take(max(missing, 0))
                ready.append(request)
        return preempted, ready

    def _residents(self) -> list[Request]:
        """The requests that run, and those that load."""
        ids = {request_id for request_id, _ in self.loads} & self.requests.keys()
        known = (self.requests[request_id] for request_id in ids)
        return [*self.running, *(one for one in known if one.state is RequestState.LOADING)]

    def _preempt(self, request: Request) -> bool:
        """Back to the queue; returns whether its blocks came back."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        insort(self.waiting, request)
        self.waiting_tokens += request.length
        self.preemptions += 1
        return self._release(request, RequestState.WAITING)

    def _share_budget(self, ready: list[Request], foreseen: Foreseen) -> list[Entry]:
        """Requests that decode come first, so that prefills never starve them."""
        budget = self.limits.max_num_batched_tokens
        entries: list[Entry] = []
        for request in sorted(ready, key=lambda one: one not in foreseen and one.work > 1):
            if budget > 0:
                entries.append(foreseen.get(request) or Entry.of(request, budget))
                budget -= entries[-1].count
        return entries

    def _admit(self, budget: int) -> tuple[list[Entry], list[Load], list[Save]]:
        """Admit waiting requests, in order, while there is room.

        A request whose lookup has no answer yet is skipped. Requests admitted past the first
        skipped one leave it a place and its blocks, and all blocks that residents may still need.
        So no request is skipped for ever. As many requests are considered as there are
        places, and named in pieces, so that a long queue does not delay the step.
        """
        size = self.limits.block_size
        entries: list[Entry] = []
        loads: list[Load] = []
        saves: list[Save] = []
        skipped = False
        reserved = growth = 0
        held_hits: list[int] = []
        places = max(self.limits.max_num_seqs - len(self.running) - self.loading, 0)
        for request in list(islice(self.waiting, places)):
            residents = len(self.running) + self.loading + skipped
            most = self.limits.names_per_step - self._named
            self._named += request.name_full_blocks(self._naming(request), size, most)
            if len(request.names) < request.length // size:
                self._unnamed = True
                break
            hits = self.pool.leading(request.names, (request.length - 1) // size, request.found)
            local = len(hits) * size
            answer = self._look_up(request, local)
            if answer is None:
                if not skipped:
                    reserved, held_hits = self._missing(request, hits, to_end=False), hits
                    growth = self._growth()
                skipped = True
                continue
            external = min(max(answer, 0), request.length - 1 - local)  # D4
            wanted = self._missing(request, hits, to_end=skipped) + reserved
            wanted += max(self.limits.headroom * residents, growth)
            if (not external and budget < 1) or wanted > self.pool.available({*hits, *held_hits}):
                break
            self._begin(request, hits, local, external)
            if skipped:
                growth += self._missing(request, request.resident.blocks, to_end=True)
            saves += self._save(request, 0, local)
            if external:
                loads.append(self._load(request))
            else:
                entries.append(Entry.of(request, budget))
                budget -= entries[-1].count
        return entries, loads, saves

    def _look_up(self, request: Request, local: int) -> int | None:
        if request.lookups_left == 0 or local == request.length - 1:
            return 0  # no lookup is left, or none could add a token (D4)
        if (request.id, request.given_up) in self.loads:
            return None  # the load that was given up still holds blocks: do not load twice at once
        order = request.order
        return self._lookup(Query(request.id, request.tokens, request.names, local, order.space))

    def _missing(self, request: Request, hits: list[int], to_end: bool) -> int:
        """Blocks to take besides the hits: up to the length, or ``to_end`` of the answer."""
        length = request.stored_positions if to_end else request.length
        return -(length // -self.limits.block_size) - len(hits)

    def _growth(self) -> int:
        """Blocks that resident requests may still need."""
        return sum(self._missing(one, one.resident.blocks, True) for one in self._residents())

    def _begin(self, request: Request, hits: list[int], local: int, external: int) -> None:
        """Admit: freeze the record, and take every block up to the request's length."""
        self.pool.hold(hits)
        self._epoch += 1
        residency = Residency(Admission(self._epoch, request.length, local, external), hits, local)
        self._dequeue(request)
        request.begin(residency)
        residency.blocks += self.pool.take(request.need(request.work, self.limits.block_size))
        if request.lookups_left is not None:
            request.lookups_left = max(request.lookups_left - 1, 0)
        if not external:
            insort(self.running, request)

    def _load(self, request: Request) -> Load:
        size, admission = self.limits.block_size, request.resident.admission
        first, last = admission.local // size, -(admission.hit // -size)
        blocks = tuple(request.resident.blocks[first:last])
        self.pool.hold(blocks)
        self.loads[request.id, admission.epoch] = blocks
        return Load(
            request.id,
            admission.epoch,
            admission.local,
            admission.external,
            tuple(request.tokens),
            tuple(request.names),
            blocks,
            request.order.space,
        )

    # --- events and commit ----------------------------------------------------------------------

    def _settle(self, request: Request, valid: int) -> None:
        """Count the verified tokens of a load; the rest is computed here."""
        residency = request.resident
        admission = residency.admission
        valid = min(max(valid, 0), admission.external)
        if valid < admission.external:
            request.failed += admission.external - valid
            if request.lookups_left is None:
                request.lookups_left = 1
            residency.admission = replace(admission, external=valid)
        residency.computed = admission.local + valid
        self._name(request, admission.local, residency.computed)
        request.move(RequestState.RUNNING)
        insort(self.running, request)

    def _advance(
        self, entry: Entry, token: int | None, outputs: list[Output], saves: list[Save]
    ) -> None:
        request, residency = entry.request, entry.request.resident
        residency.computed += entry.count
        size = self.limits.block_size
        last = entry.samples and request.order.prefill_only
        if last or residency.computed // size > entry.start // size:
            self._name(request, entry.start, residency.computed)
            saves += self._save(request, entry.start, residency.computed, tail=last)
        if not entry.samples or token == NO_TOKEN:
            return
        if token is None:
            raise RuntimeError(f"request {request.id}: no token for an entry that samples")
        request.tokens.append(token)
        finish = request.ends_with(token)
        outputs.append(Output(request, token, finish))
        if finish or request.order.prefill_only:
            self._finish(request, finish)

    def _naming(self, request: Request) -> Naming:
        """The hash chain of the request's tenant, so that tenants share no blocks."""
        return self.naming.of(request.order.space)

    def _name(self, request: Request, start: int, stop: int) -> None:
        """D6: name the blocks that became full between ``start`` and ``stop``."""
        size = self.limits.block_size
        request.name_full_blocks(self._naming(request), size)
        for index in range(start // size, stop // size):
            self.pool.name(request.resident.blocks[index], request.names[index])

    def _save(self, request: Request, start: int, stop: int, tail: bool = False) -> list[Save]:
        """Save the full blocks of ``[start, stop)`` to the store.

        ``tail``: also save a partial last block, so that a prompt of any length can be handed over.
        """
        size = self.limits.block_size
        end = stop if tail else stop // size * size
        contents = tuple(
            self._content(request, first, min(first + size, end))
            for first in range(start // size * size, end, size)
        )
        if not request.order.save or not contents:
            return []
        self._serial += 1
        epoch, space = request.resident.admission.epoch, request.order.space
        save = Save(request.id, epoch, self._serial, contents, space)
        self.saves[save.request_id, save.epoch, save.serial] = save.blocks
        self.pool.hold(save.blocks)
        return [save]

    def _content(self, request: Request, start: int, stop: int) -> BlockContent:
        index, tokens = start // self.limits.block_size, tuple(request.tokens[start:stop])
        naming = self._naming(request)
        parent = request.names[index - 1] if index else naming.root
        full = len(tokens) == self.limits.block_size
        name = request.names[index] if full else naming.child(parent, tokens)
        return BlockContent(request.resident.blocks[index], name, parent, tokens)

    def _finish(self, request: Request, finish: Finish | None) -> None:
        """End a request. It is removed first, so that broken accounting fails only once."""
        del self.requests[request.id]
        if request.state is RequestState.WAITING:
            self._dequeue(request)
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
        request.finish = finish
        self._release(request, RequestState.FINISHED)

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self.waiting_tokens -= request.length

    def _release(self, request: Request, state: RequestState) -> bool:
        """End the residency, if any, and cancel its load; returns whether its blocks came back."""
        if (residency := request.end(state)) is None:
            return True
        self.pool.drop(residency.blocks)
        key = (request.id, residency.admission.epoch)
        if key in self.loads and self._cancel(*key):
            self.pool.drop(self.loads.pop(key))
        return key not in self.loads
