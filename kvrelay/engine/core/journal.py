"""A scheduler that records every call, every lookup answer and every outcome.

One JSON object a line. The first has the limits. Each other one is a call: its arguments
(``given``), the ``answers`` of its lookups and of its ``cancels`` of loads, and its ``result`` with
the counters after it. The core depends on nothing else, so ``core.replay`` can repeat it. A journal
holds prompts: keep it private. Tenants appear as digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Load, Query, Save
from kvrelay.engine.core.foresight import NOTHING, Foreseen
from kvrelay.engine.core.plan import Committed, EngineLimits, Plan
from kvrelay.engine.core.request import Finish, Order, Request, RequestState
from kvrelay.engine.core.scheduler import Cancel, Lookup, Scheduler
from kvrelay.engine.core.usage import leg_tokens
from kvrelay.errors import Rejected

VERSION = 4
Json = None | bool | int | str | Sequence["Json"] | dict[str, "Json"]
Record = dict[str, Json]


class Journal(Scheduler):
    """A ``Scheduler`` that gives ``write`` a line, newline included, for each call."""

    def __init__(
        self,
        limits: EngineLimits,
        naming: Naming,
        lookup: Lookup,
        write: Callable[[str], object],
        cancel: Cancel = lambda request_id, epoch: False,
    ) -> None:
        super().__init__(limits, naming, self._record_lookup, self._record_cancel)
        self._unrecorded_lookup = lookup
        self._unrecorded_cancel = cancel
        self._write = write
        self._answers: list[Json] = []
        self._cancels: list[Json] = []
        self._line({"journal": VERSION, "limits": asdict(limits)})

    def submit(self, order: Order) -> Request:
        given = _order(order)
        try:
            request = super().submit(order)
        except Rejected as error:
            self._note("submit", given, {"rejected": error.field})
            raise
        self._note("submit", given, {})
        return request

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> Request | None:
        request = super().abort(request_id, finish)
        given: Record = {"id": request_id, "finish": finish.value}
        self._note("abort", given, {"ended": _ended([] if request is None else [request])})
        return request

    def schedule(self, foreseen: Foreseen = NOTHING) -> Plan:
        plan = super().schedule(foreseen)
        if self._answers or not is_empty(plan):
            self._note("schedule", {}, describe_plan(plan))
        return plan

    def commit(self, plan: Plan, sampled: Sequence[int | None]) -> Committed:
        committed = super().commit(plan, sampled)
        if not is_empty(plan):
            self._note("commit", {"sampled": list(sampled)}, describe_committed(committed))
        return committed

    def discard(self) -> Plan | None:
        plan = super().discard()
        if plan is not None and not is_empty(plan):
            self._note("discard", {}, {})
        return plan

    def loaded(self, request_id: str, epoch: int, valid: int) -> Request | None:
        request = super().loaded(request_id, epoch, valid)
        given: Record = {"id": request_id, "epoch": epoch, "valid": valid}
        self._note("loaded", given, {"heard": request is not None})
        return request

    def saved(self, request_id: str, epoch: int, serial: int) -> None:
        super().saved(request_id, epoch, serial)
        self._note("saved", {"id": request_id, "epoch": epoch, "serial": serial}, {})

    def _record_lookup(self, query: Query) -> int | None:
        answer = self._unrecorded_lookup(query)
        self._answers.append(answer)
        return answer

    def _record_cancel(self, request_id: str, epoch: int) -> bool:
        cancelled = self._unrecorded_cancel(request_id, epoch)
        self._cancels.append(cancelled)
        return cancelled

    def _note(self, call: str, given: Record, result: Record) -> None:
        heard: Record = {"answers": self._answers, "cancels": self._cancels}
        self._answers = []
        self._cancels = []
        self._line({"call": call, "given": given, **heard, "result": {**result, **counters(self)}})

    def _line(self, record: Record) -> None:
        """Write one line. After a failed write the journal ends and the worker continues."""
        try:
            self._write(json.dumps(record, separators=(",", ":")) + "\n")
        except OSError:
            self._write = _nowhere


def _nowhere(line: str) -> None:
    """The writer after a failed write."""


def is_empty(plan: Plan) -> bool:
    """Whether a plan changes nothing; the journal leaves such plans out."""
    changes = (plan.entries, plan.loads, plan.saves, plan.preempted, plan.named, plan.unnamed)
    return not any(changes)


def counters(scheduler: Scheduler) -> Record:
    """The counters of the scheduler; no outcome has a field of one of these names."""
    return {
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "open_loads": len(scheduler.loads),
        "open_saves": len(scheduler.saves),
        "free": len(scheduler.pool.free),
        "late": scheduler.late_events,
        "preemptions": scheduler.preemptions,
    }


def describe_plan(plan: Plan) -> Record:
    """A plan with its blocks, but without block names: they follow from the tokens."""
    return {
        "entries": [
            [entry.request.id, entry.epoch, entry.start, entry.count, entry.samples]
            for entry in plan.entries
        ],
        "tables": [list(entry.request.resident.blocks) for entry in plan.entries],
        "loads": [_load(load) for load in plan.loads],
        "saves": [_save(save) for save in plan.saves],
        "preempted": [request.id for request in plan.preempted],
        "named": plan.named,
        "unnamed": plan.unnamed,
    }


def describe_committed(committed: Committed) -> Record:
    """The outcome of a step, with the accounts of the requests that it ended."""
    outputs = committed.outputs
    return {
        "outputs": [
            [output.request.id, output.token, output.finish.value if output.finish else None]
            for output in outputs
        ],
        "saves": [_save(save) for save in committed.saves],
        "ended": _ended([output.request for output in outputs]),
    }


def _order(order: Order) -> Record:
    return {
        "id": order.request_id,
        "tokens": list(order.tokens),
        "prompt_len": order.prompt_len,
        "max_tokens": order.max_tokens,
        "ending": sorted(order.ending),
        "prefill_only": order.prefill_only,
        "save": order.save,
        "space": hashlib.sha256(order.space).hexdigest()[:16] if order.space else "",
    }


def _load(load: Load) -> Json:
    return [load.request_id, load.epoch, load.local, load.external, list(load.blocks)]


def _save(save: Save) -> Json:
    counts = [len(piece.tokens) for piece in save.contents]
    return [save.request_id, save.epoch, save.serial, list(save.blocks), counts]


def _ended(requests: Sequence[Request]) -> Json:
    return {
        request.id: {**asdict(leg_tokens(request)), "runs": len(request.runs)}
        for request in requests
        if request.state is RequestState.FINISHED
    }
