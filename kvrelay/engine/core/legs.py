"""The legs of one engine apart from their scheduling: stop strings, times, loads and saves.

``Legs`` collects the updates that the streams of the legs get, and adds each leg to the totals
once. Pure: times are passed in, in seconds of the engine's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Save, Saved, apportion
from kvrelay.engine.core.plan import Committed, Entry
from kvrelay.engine.core.request import Request, RequestState
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.core.updates import (
    Admitted,
    Ended,
    Failed,
    LegTrace,
    OutputGrammar,
    Timing,
    Update,
    Work,
)
from kvrelay.engine.core.usage import leg_tokens, missed_blocks
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss, MissedBlocks


class StopChecker(Protocol):
    """Watches the text of one output for stop strings."""

    def stops_at(self, token: int) -> bool:
        """Whether ``token``, the next one, completes a stop string."""


@dataclass(eq=False, slots=True)
class Leg:
    """One request in the engine."""

    request: Request
    sampling: Sampling
    stop_checker: StopChecker | None
    submitted: float
    grammar: OutputGrammar | None = None
    trace: LegTrace | None = None
    admitted: float | None = None
    lookup: tuple[float, float] | None = None  # of the first admission: begin and end
    asked: int = 0  # most tokens that an admission looked up before the leg ran
    miss: Miss | None = None  # why the lookup of the first admission found no more
    first: Admitted | None = None
    running: float | None = None
    first_token: float | None = None
    preemptions: int = 0
    open_saves: int = 0
    stored: set[bytes] = field(default_factory=set)
    tail: BlockContent | None = None  # the partial last block, once its save has started

    def work(self, entry: Entry) -> Work:
        """What the model runner gets for an entry of this leg."""
        request = entry.request
        return Work(
            tokens=request.tokens,
            start=entry.start,
            count=entry.count,
            blocks=request.resident.blocks,
            prompt_len=request.order.prompt_len,
            sampling=self.sampling if entry.samples else None,
            grammar=self.grammar if entry.samples else None,
        )

    def note_running(self, now: float) -> None:
        """Note the first step that computes positions of this leg."""
        if self.running is None:
            self.running = now

    def note_save(self, save: Save, block_size: int) -> None:
        """Note the start of a save."""
        self.open_saves += 1
        if len(save.contents[-1].tokens) < block_size:
            self.tail = save.contents[-1]

    def note_saved(self, save: Save, stored: int) -> None:
        """Note the end of a save: its first ``stored`` blocks are in the store."""
        self.open_saves -= 1
        self.stored.update(content.name for content in save.contents[: max(stored, 0)])

    def account(self, block_size: int, until: float | None = None) -> Ended:
        """The account of the finished request, or of one that has run ``until`` now."""
        blocks = [(name, block_size) for name in self.request.names]
        if self.tail is not None:
            blocks.append((self.tail.name, len(self.tail.tokens)))
        saved = 0
        last_name = None
        for name, count in blocks:
            if name not in self.stored:
                break
            saved += count
            last_name = name
        return Ended(
            tokens=leg_tokens(self.request),
            timing=self._timing(until),
            preemptions=self.preemptions,
            saved=saved,
            last_name=last_name,
            sources={} if self.first is None else self.first.sources,
            missed=None if self.first is None else self.first.missed,
        )

    def _timing(self, until: float | None) -> Timing:
        admitted = _first(self.admitted, until, self.submitted)
        running = _first(self.running, until, admitted)
        first = _first(self.first_token, until, running)
        return Timing(
            queue=admitted - self.submitted,
            load=running - admitted,
            run=first - running,
            submitted=self.submitted,
            lookup=self.lookup,
        )


class Legs:
    """The open legs by request id, the transfers they started, and the totals of all legs."""

    def __init__(self, block_size: int) -> None:
        self.totals = Totals()
        self._block_size = block_size
        self._open: dict[str, Leg] = {}
        self._ended = Counter[str]()  # the sums of the accounts of the legs that have left
        self._saves: dict[tuple[str, int, int], tuple[Leg | None, Save]] = {}
        self._loads: dict[tuple[str, int], int] = {}  # tokens ordered by each open load
        self._updates: list[tuple[str, Update]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __getitem__(self, request_id: str) -> Leg:
        return self._open[request_id]

    @property
    def ids(self) -> list[str]:
        """The request ids of the open legs."""
        return list(self._open)

    def audit(self, executed: int) -> Iterator[Finding]:
        """I5: the positions that the runner ``executed`` are accounted for. I9: the totals."""
        totals = self.totals
        if totals.executed != executed:
            message = f"{executed} positions executed, {totals.executed} accounted"
            yield Finding("I5", None, message)
        if not totals.adds_up:
            yield Finding("I9", None, f"sums by source do not add up: {totals}")
        accounts = Counter(self._ended)
        for leg in self._open.values():
            accounts.update(_countable(leg))
        sums = asdict(totals)
        for name, count in accounts.items():
            if (total := sums[name]) != count:
                yield Finding("I9", None, f"{name} is {total}, the legs' accounts sum to {count}")

    def add(self, leg: Leg) -> None:
        """Open a leg."""
        self._open[leg.request.id] = leg

    def start_load(self, load: Load) -> None:
        """A load was ordered."""
        self._loads[load.request_id, load.epoch] = load.external

    def start_save(self, save: Save) -> None:
        """A save was ordered."""
        leg = self._open.get(save.request_id)
        if leg is not None:
            leg.note_save(save, self._block_size)
        self._saves[save.request_id, save.epoch, save.serial] = leg, save

    def end_load(self, event: Loaded, request: Request | None) -> None:
        """A load ended; ``request`` runs with its blocks, ``None`` if the load ended too late."""
        ordered = self._loads.pop((event.request_id, event.epoch), 0)
        if request is None:
            self.totals = self.totals.with_load(0, min(max(event.valid, 0), ordered))
            return
        leg, admission = self._open[request.id], request.resident.admission
        self.totals = self.totals.with_load(ordered - admission.external, 0)
        first, last = admission.local // self._block_size, admission.hit // self._block_size
        leg.stored.update(request.names[first:last])
        if leg.first is None:
            sources = apportion(event.sources, admission.external)
            self._tell_admission(leg, sources, event.missed or leg.miss)

    def end_save(self, event: Saved) -> Leg | None:
        """A save ended; returns its leg, ``None`` for an unknown save or one without a leg."""
        leg, save = self._saves.pop((event.request_id, event.epoch, event.serial), (None, None))
        if leg is not None and save is not None:
            leg.note_saved(save, event.stored)
        return leg

    def note_admission(self, leg: Leg, miss: Miss | None, now: float) -> None:
        """Note an admission of a leg that has not run; ``miss`` is why the lookup found no more.

        If its load is given up, the next admission is the first that counts.
        """
        if leg.admitted is None:
            leg.admitted = now
        leg.miss = miss
        admission = leg.request.resident.admission
        asked = admission.length - admission.local
        if asked > max(leg.asked, 1):
            self.totals = self.totals.with_question(asked - leg.asked)
            leg.asked = asked
        if not admission.external:
            self._tell_admission(leg, {}, miss)

    def _tell_admission(self, leg: Leg, sources: Mapping[str, int], miss: Miss | None) -> None:
        admission = leg.request.resident.admission
        blocks = missed_blocks(admission, self._block_size)
        missed = MissedBlocks(miss, blocks) if miss is not None and blocks else None
        leg.first = Admitted(admission, sources, missed)
        self.queue_update(leg.request.id, leg.first)

    def note_preempted(self, requests: Sequence[Request]) -> None:
        """Note the requests that a plan preempted."""
        for request in requests:
            self._open[request.id].preemptions += 1
        self.totals = self.totals.with_preemptions(len(requests))

    def note_step(self, committed: Committed) -> None:
        """Note the outcome of a step."""
        self.totals = self.totals.with_step(committed)

    def note_token(self, leg: Leg, now: float) -> None:
        """Count the leg's prompt with its first token."""
        if leg.first_token is None and (first := leg.first) is not None:
            leg.first_token = now
            self.totals = self.totals.with_first_token(first.admission, first.sources, first.missed)

    def queue_update(self, request_id: str, update: Update) -> None:
        """Queue an update."""
        self._updates.append((request_id, update))

    def fail(self, request_id: str, error: KvrelayError) -> None:
        """Queue the error that ends a request."""
        self.queue_update(request_id, Failed(error))

    def take_updates(self) -> list[tuple[str, Update]]:
        """The updates since the last call, each with its request id."""
        updates = self._updates
        self._updates = []
        return updates

    def end(self, leg: Leg) -> bool:
        """Queue the account of a finished leg, once its saves have ended if they matter.

        Returns whether the leg has left.
        """
        request = leg.request
        if request.state is not RequestState.FINISHED or self._open.get(request.id) is not leg:
            return False
        if request.order.prefill_only and leg.open_saves:
            return False
        self.queue_update(request.id, leg.account(self._block_size))
        self._leave(leg)
        return True

    def drop(self, request_id: str, lookup: tuple[float, float] | None, now: float) -> bool:
        """Close a leg without an account for its stream; returns whether it was open.

        ``lookup``: begin and end of the last one.
        """
        leg = self._open.get(request_id)
        if leg is None:
            return False
        if leg.trace is not None:
            leg.lookup = leg.lookup or lookup
            leg.trace.dropped(leg.account(self._block_size, now), now)
        self._leave(leg)
        return True

    def _leave(self, leg: Leg) -> None:
        """Close the leg; called once for every leg."""
        del self._open[leg.request.id]
        self._ended.update(_countable(leg))
        self.totals = self.totals.with_leg(leg.request.finish)


def _first(*moments: float | None) -> float:
    return next(moment for moment in moments if moment is not None)


def _countable(leg: Leg) -> Mapping[str, int]:
    """The numbers of a leg's account that ``Totals`` sums up, by the names of its fields."""
    tokens = leg_tokens(leg.request)
    return {
        "generated": tokens.generated,
        "executed": tokens.executed,
        "recomputed": tokens.recomputed,
        "failed": tokens.failed,
        "preemptions": leg.preemptions,
    }
