"""The legs of one engine apart from their scheduling: stop strings, times, loads and saves.

``Legs`` collects the updates that the streams of the legs get, and adds each leg to the totals
once. Pure: times are passed in, in seconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.engine.core.external import BlockContent, Load, Loaded, Save, Saved, apportion
from kvrelay.engine.core.request import Admission, Request, RequestState
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.core.updates import Ended, Failed, Timing, Update
from kvrelay.engine.core.usage import LegTokens, first_run, leg_tokens, missed_blocks
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
    epoch: int = 0  # of the last admission that was noted
    miss: Miss | None = None  # why the last lookup or load ended where it did
    missed: MissedBlocks | None = None  # by the admission that made the first token
    admitted: float | None = None
    running: float | None = None
    first_token: float | None = None
    preemptions: int = 0
    open_saves: int = 0
    stored: set[bytes] = field(default_factory=set)
    tail: BlockContent | None = None  # the partial last block, once its save has started
    sources: dict[int, Mapping[str, int]] = field(default_factory=dict)  # of loads, by epoch

    def note_admitted(self, epoch: int, miss: Miss | None, now: float) -> None:
        """Note an admission; without a lookup of its own it keeps the last reason."""
        self.epoch = epoch
        self.miss = miss or self.miss
        if self.admitted is None:
            self.admitted = now

    def note_running(self, now: float) -> None:
        """Note the first step that computes positions of this leg."""
        if self.running is None:
            self.running = now

    def note_first_token(self, admission: Admission, block_size: int, now: float) -> None:
        """Note the first token and the admission that it came from; called once."""
        self.first_token = now
        blocks = missed_blocks(admission, block_size)
        self.missed = MissedBlocks(self.miss, blocks) if self.miss is not None and blocks else None

    def note_save(self, save: Save, block_size: int) -> None:
        """Note the start of a save."""
        self.open_saves += 1
        if len(save.contents[-1].tokens) < block_size:
            self.tail = save.contents[-1]

    def note_saved(self, save: Save, stored: int) -> None:
        """Note the end of a save: its first ``stored`` blocks are in the store."""
        self.open_saves -= 1
        self.stored.update(content.name for content in save.contents[: max(stored, 0)])

    def note_loaded(self, names: Sequence[bytes], event: Loaded) -> None:
        """Note the end of a load: the store has the blocks ``names``."""
        self.stored.update(names)
        self.miss = event.missed or self.miss
        admission = self.request.resident.admission
        self.sources[admission.epoch] = apportion(event.sources, admission.external)

    def sources_of(self, admission: Admission) -> Mapping[str, int]:
        """The external tokens of an admission, by store."""
        return self.sources.get(admission.epoch, {})

    def account(self, block_size: int) -> Ended:
        """The account of the finished request."""
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
        first = first_run(self.request)
        return Ended(
            tokens=leg_tokens(self.request),
            timing=self._timing(),
            preemptions=self.preemptions,
            saved=saved,
            last_name=last_name,
            sources={} if first is None else self.sources_of(first.admission),
            missed=self.missed,
        )

    def _timing(self) -> Timing:
        admitted = self.submitted if self.admitted is None else self.admitted
        running = admitted if self.running is None else self.running
        first = running if self.first_token is None else self.first_token
        return Timing(admitted - self.submitted, running - admitted, first - running)


class Legs:
    """The open legs by request id, the transfers they started, and the totals of all legs."""

    def __init__(self, block_size: int) -> None:
        self.totals = Totals()
        self._block_size = block_size
        self._open: dict[str, Leg] = {}
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

    @property
    def executed(self) -> int:
        """Positions that the open and the ended legs account for (invariant I5)."""
        return self.totals.executed + sum(leg.request.executed for leg in self._open.values())

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
            self.totals = self.totals.with_late(min(max(event.valid, 0), ordered))
            return
        admission = request.resident.admission
        first, last = admission.local // self._block_size, admission.hit // self._block_size
        self._open[request.id].note_loaded(request.names[first:last], event)

    def end_save(self, event: Saved) -> Leg | None:
        """A save ended; returns its leg, ``None`` for an unknown save or one without a leg."""
        leg, save = self._saves.pop((event.request_id, event.epoch, event.serial), (None, None))
        if leg is not None and save is not None:
            leg.note_saved(save, event.stored)
        return leg

    def note_token(self, leg: Leg, now: float) -> Admission | None:
        """Count the leg's prompt with its first token, and return the admission that made it."""
        if leg.first_token is not None:
            return None
        admission = leg.request.last_admission
        leg.note_first_token(admission, self._block_size, now)
        sources = leg.sources_of(admission)
        self.totals = self.totals.with_first_token(admission, sources, leg.missed)
        return admission

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
        ended = leg.account(self._block_size)
        self.queue_update(request.id, ended)
        self._leave(leg, ended.tokens)
        return True

    def drop(self, request_id: str) -> bool:
        """Close a leg without an account for its stream; returns whether it was open."""
        leg = self._open.get(request_id)
        if leg is not None:
            self._leave(leg, leg_tokens(leg.request))
        return leg is not None

    def _leave(self, leg: Leg, account: LegTokens) -> None:
        """Close the leg and add it to the totals; called once for every leg."""
        del self._open[leg.request.id]
        self.totals = self.totals.with_leg(account, leg.preemptions, leg.request.finish)
