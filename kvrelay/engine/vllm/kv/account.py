"""The account of one request in vLLM: its admissions, and what was found, loaded and computed.

vLLM's own ``num_cached_tokens`` is what a lookup promised; after a failed load it is wrong. Every
number here is written when its event happens, under the definitions of docs/accounting.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvrelay.engine.core.external import apportion
from kvrelay.engine.core.request import Admission, Run
from kvrelay.engine.core.usage import computed_positions, missed_blocks
from kvrelay.engine.vllm.kv.border import VllmRequest
from kvrelay.usage import Miss, MissedBlocks


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """One request as it is now; ``runs`` are its residencies that computed, the current one last.

    ``length``, ``sources`` and ``missed`` belong to the first of them. ``failed`` tokens were found
    by a lookup and not loaded. ``asked`` tokens were looked up for the first residency. ``saved``
    leading tokens are in the store, ``last_name`` names the last block among them.
    ``load_seconds`` run from the order of the first load to its end.
    """

    length: int
    runs: tuple[Run, ...]
    failed: int
    preemptions: int
    asked: int
    sources: Mapping[str, int]
    missed: MissedBlocks | None
    saved: int
    last_name: bytes | None
    load_seconds: float = 0.0

    @property
    def local(self) -> int:
        """Tokens that the first residency found in vLLM's own cache."""
        return self.runs[0].admission.local if self.runs else 0

    @property
    def external(self) -> int:
        """Tokens that the first residency loaded, verified, from the store."""
        return self.runs[0].admission.external if self.runs else 0

    @property
    def computed(self) -> int:
        """Tokens of the first admission that were computed here, so far."""
        furthest = max((run.frontier for run in self.runs), default=0)
        return min(furthest, self.length) - self.local - self.external

    @property
    def executed(self) -> int:
        """Positions that went through the model."""
        return sum(run.executed for run in self.runs)

    @property
    def recomputed(self) -> int:
        """Positions of them that this request had computed before."""
        furthest = max((run.frontier for run in self.runs), default=0)
        return self.executed - computed_positions(self.runs, 0, furthest)

    def numbers(self) -> dict[str, int | str]:
        """The account as vLLM's ``kv_transfer_params`` of an answer carry it."""
        names = ("length", "local", "external", "computed", "executed", "recomputed", "failed")
        numbers: dict[str, int | str] = {name: getattr(self, name) for name in names}
        numbers["preemptions"] = self.preemptions
        numbers["saved"] = self.saved
        if self.missed is not None:
            numbers["missed"] = str(self.missed.reason)
            numbers["missed_blocks"] = self.missed.blocks
        return numbers


class LegListener(Protocol):
    """Is told of admissions and ends on the thread of vLLM's scheduler."""

    def admitted(self, request_id: str, account: RequestAccount) -> None:
        """The request's first step is about to run; its external tokens are verified."""

    def left(self, request_id: str, account: RequestAccount) -> None:
        """The request has finished or was aborted, and all its saves have ended."""


@dataclass(eq=False, slots=True)
class Track:
    """One request on the side of vLLM's scheduler.

    ``chains`` are the names of its full blocks in each shard of the heads. ``computed`` positions
    are valid; ``offered`` blocks were offered to the store in this residency.
    """

    request: VllmRequest
    space: bytes
    chains: tuple[list[bytes], ...]
    looks: bool
    saves: bool
    save_tail: bool
    length: int = 0
    local: int = 0  # of the last lookup
    shortest_shard: int = 0  # that had the fewest tokens then
    admission: Admission | None = None
    loading: bool = False
    ordered_at: float = 0.0
    load_seconds: float = 0.0
    started: bool = False
    begun_after: int = 0  # preemptions before this residency
    computed: int = 0
    offered: int = 0
    lookups_left: int | None = None  # None: no limit; set by a failed load
    asked: int = 0
    waited: bool = False  # a step waited for the answer to its first question
    failed: int = 0
    runs: list[Run] = field(default_factory=list)
    miss: Miss | None = None
    loaded_from: tuple[tuple[str, int], ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    missed: MissedBlocks | None = None
    stored: set[int] = field(default_factory=set)  # full blocks in the store, by index
    tail: int = 0  # positions of the partial last block, once its save has started
    tail_stored: bool = False
    open_saves: int = 0
    finished: bool = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def resident(self) -> bool:
        """Whether the request has its blocks: admitted, and not preempted since."""
        return self.admission is not None and self.request.num_preemptions == self.begun_after

    def begin(self, epoch: int, external: int, miss: Miss | None) -> Admission:
        """A residency begins with ``external`` promised tokens."""
        self.end()
        admission = Admission(epoch, self.request.num_tokens, self.local, external)
        self.admission = admission
        self.computed = admission.local
        self.loading = external > 0
        self.offered = 0
        self.begun_after = self.request.num_preemptions
        self.miss = miss
        self.loaded_from = ()
        question = admission.length - admission.local
        if not self.runs and question > max(self.asked, 1):
            self.asked = question
        if self.lookups_left is not None:
            self.lookups_left = max(self.lookups_left - 1, 0)
        return admission

    def settle(
        self, valid: int, miss: Miss | None, sources: tuple[tuple[str, int], ...], size: int
    ) -> None:
        """The load of this residency ended with ``valid`` leading tokens."""
        admission = self.admission
        if admission is None or not self.loading:
            return
        valid = min(max(valid, 0), admission.external)
        if valid < admission.external:
            self.failed += admission.external - valid
            if self.lookups_left is None:
                self.lookups_left = 1
        self.admission = replace(admission, external=valid)
        self.computed = self.admission.hit
        self.stored.update(range(admission.local // size, self.computed // size))
        self.loading = False
        self.miss = miss or self.miss
        self.loaded_from = sources

    def start(self, position: int, size: int) -> bool:
        """The first step of a residency computes from ``position``; whether it is the first one."""
        admission = self.admission
        if admission is None or self.started:
            return False
        if position != admission.hit:  # vLLM decides which positions it computes
            admission = replace(admission, local=max(position - admission.external, 0))
            self.admission = admission
        self.started = True
        self.computed = position
        if self.runs:
            return False
        self.length = admission.length
        self.sources = apportion(self.loaded_from, admission.external)
        blocks = missed_blocks(admission, size)
        self.missed = MissedBlocks(self.miss, blocks) if self.miss is not None and blocks else None
        return True

    def end(self) -> None:
        """The residency is over: finished, aborted or preempted."""
        if self.admission is not None and self.started:
            self.runs.append(Run(self.admission, self.computed))
        self.admission = None
        self.started = False
        self.loading = False

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """Every residency that computed, with the current one."""
        if self.admission is None or not self.started:
            return tuple(self.runs)
        return (*self.runs, Run(self.admission, self.computed))

    def saved(self, size: int) -> int:
        """Leading tokens in the store, as far as this request knows."""
        full = 0
        while full in self.stored:
            full += 1
        whole = full == self.request.num_prompt_tokens // size
        return full * size + (self.tail if whole and self.tail_stored else 0)
