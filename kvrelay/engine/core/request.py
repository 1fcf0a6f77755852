"""One request on one worker: its tokens, its state, and what it owns while it is resident.

The terms and formulas are those of docs/accounting.md. Every number has one writer: tokens grow in
``Scheduler.commit``, a residency begins with an admission and is dropped whole, the log of runs is
appended when a residency that ran ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from kvrelay.engine.core.blocks import LeadingRun, Naming
from kvrelay.sampling import stored_positions


class RequestState(Enum):
    """The state of a request; ``TRANSITIONS`` has the changes that are allowed."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: Mapping[RequestState, Set[RequestState]] = {
    RequestState.WAITING: {RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.LOADING: {RequestState.WAITING, RequestState.RUNNING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Admission:
    """How a residency began: ``length = local + external + fresh``, ``fresh >= 1``."""

    epoch: int
    length: int
    local: int
    external: int

    def __post_init__(self) -> None:
        assert min(self.local, self.external, self.fresh - 1) >= 0, self

    @property
    def hit(self) -> int:
        """Tokens whose KV was found in the pool or the store."""
        return self.local + self.external

    @property
    def fresh(self) -> int:
        """Tokens still to compute, the last one always among them."""
        return self.length - self.hit


@dataclass(frozen=True, slots=True)
class Run:
    """A residency that ran and ended: it computed positions ``[admission.hit, frontier)``."""

    admission: Admission
    frontier: int

    @property
    def executed(self) -> int:
        """Positions the runner computed (invariant I5)."""
        return self.frontier - self.admission.hit


@dataclass(slots=True)
class Residency:
    """What a request owns while it holds blocks; KV of positions ``[0, computed)`` is valid."""

    admission: Admission
    blocks: list[int]
    computed: int


@dataclass(frozen=True, slots=True)
class Order:
    """A request as it is submitted. ``tokens`` are the prompt and the output tokens so far.

    ``max_tokens`` counts all output tokens, those so far included. ``ending`` holds the token ids
    that end the request when sampled. A ``prefill_only`` order ends with its first new token and
    saves its partial last block too; ``save`` offers full blocks to the store. ``space`` is what
    separates the tenant's blocks from others, empty without tenants: only these can be found.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    ending: frozenset[int] = frozenset()
    prefill_only: bool = False
    save: bool = True
    space: bytes = field(default=b"", repr=False)


@dataclass(eq=False, slots=True)
class Request:
    """An order that the engine has accepted."""

    order: Order
    tokens: list[int]
    arrival: int = 0
    names: list[bytes] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    residency: Residency | None = None
    runs: list[Run] = field(default_factory=list)
    finish: Finish | None = None
    lookups_left: int | None = None  # None: no limit; set by a failed load
    failed: int = 0  # external tokens that a lookup found and the load did not
    given_up: int = 0  # epoch of the last load that a preemption gave up
    found: LeadingRun = field(default_factory=LeadingRun)  # by its names, while it waits

    def __lt__(self, other: Request) -> bool:
        """First come, first served."""
        return self.arrival < other.arrival

    @classmethod
    def of(cls, order: Order, arrival: int = 0) -> Request:
        return cls(order, list(order.tokens), arrival)

    @property
    def id(self) -> str:
        return self.order.request_id

    @property
    def length(self) -> int:
        """``L``: prompt and output."""
        return len(self.tokens)

    @property
    def resident(self) -> Residency:
        """The residency of a request that must have one."""
        assert self.residency is not None, self.id
        return self.residency

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """The log of runs, with the run of a running request as it is now."""
        residency = self.residency
        if residency is None or self.state is not RequestState.RUNNING:
            return tuple(self.runs)
        return (*self.runs, Run(residency.admission, residency.computed))

    @property
    def work(self) -> int:
        """D2: positions to compute before the next token can be sampled."""
        return self.length - self.resident.computed

    @property
    def stored_positions(self) -> int:
        """Positions whose KV the request stores at most (D5)."""
        if self.order.prefill_only:
            return len(self.order.tokens)
        return stored_positions(self.order.prompt_len, self.order.max_tokens)

    def resides(self, epoch: int, state: RequestState) -> bool:
        """Whether ``epoch`` is that of the current residency, in this state."""
        residency = self.residency
        return self.state is state and residency is not None and residency.admission.epoch == epoch

    def need(self, count: int, block_size: int) -> int:
        """D1, the only formula for blocks: those to take before computing ``count`` positions."""
        resident = self.resident
        return -((resident.computed + count) // -block_size) - len(resident.blocks)

    def move(self, state: RequestState) -> None:
        """The one way to change state."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.id}: no transition from {self.state} to {state}")
        self.state = state

    def begin(self, residency: Residency) -> None:
        """Begin a residency."""
        self.move(RequestState.LOADING if residency.admission.external else RequestState.RUNNING)
        self.residency = residency
        self.found = LeadingRun()

    def end(self, state: RequestState) -> Residency | None:
        """End the residency, if any, and log what it computed; returns it."""
        residency = self.residency
        self.residency = None
        if residency is not None and self.state is RequestState.RUNNING:
            self.runs.append(Run(residency.admission, residency.computed))
        elif residency is not None and state is RequestState.WAITING:
            self.given_up = residency.admission.epoch
        self.move(state)
        return residency

    def ends_with(self, token: int) -> Finish | None:
        """Why ``token``, just appended, ends the request; ``None`` if it does not."""
        if token in self.order.ending:
            return Finish.STOP
        if self.length >= self.order.prompt_len + self.order.max_tokens:
            return Finish.LENGTH
        return None

    def name_full_blocks(self, name: Naming, block_size: int, most: int | None = None) -> int:
        """Extend ``names`` to all full blocks of ``tokens``, or by ``most``; returns by how many.

        A name never changes.
        """
        first = len(self.names) * block_size
        starts = range(first, self.length - block_size + 1, block_size)[:most]
        for start in starts:
            parent = self.names[-1] if self.names else name.root
            self.names.append(name.child(parent, self.tokens[start : start + block_size]))
        return len(starts)
