"""The legs of a vLLM engine: their updates, times and accounts, and the totals of all legs.

Pure: times and accounts are passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.legs import StopChecker
from kvrelay.engine.core.request import Finish, Order
from kvrelay.engine.core.totals import Totals
from kvrelay.engine.core.updates import (
    Admitted,
    Ended,
    LegTrace,
    OutputGrammar,
    Timing,
    Update,
)
from kvrelay.engine.core.usage import LegTokens
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.sampling import Sampling

AccountOf = Callable[[str], RequestAccount]
SUMMED = ("executed", "recomputed", "failed", "preemptions")


@dataclass(eq=False, slots=True)
class VllmLeg:
    """One request in the engine."""

    order: Order
    sampling: Sampling
    stop_checker: StopChecker | None
    grammar: OutputGrammar | None
    submitted: float
    trace: LegTrace | None = None
    first: Admitted | None = None
    running: float | None = None
    load_seconds: float = 0.0
    first_token: float | None = None
    generated: int = 0
    finished: bool = False
    finish: Finish | None = None
    counted: Mapping[str, int] = field(default_factory=dict)  # what the totals have of this leg
    last: RequestAccount | None = None  # once the request and its saves have ended

    @property
    def id(self) -> str:
        return self.order.request_id

    def finish_at(self, token: int) -> Finish | None:
        """Why ``token``, the last of those generated, ends the request."""
        order = self.order
        if token in order.ending:
            return Finish.STOP
        if len(order.tokens) + self.generated >= order.prompt_len + order.max_tokens:
            return Finish.LENGTH
        return None

    def timing(self, until: float | None = None) -> Timing:
        """Seconds until admitted, until loaded, and until the first token.

        ``until``: the moment of what has not happened.
        """
        running = self.running or until or self.submitted
        first = self.first_token or until or running
        waited = max(running - self.submitted - self.load_seconds, 0.0)
        return Timing(waited, self.load_seconds, first - running, self.submitted)


class VllmLegs:
    """The open legs by request id, their updates, and the totals of all legs."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._open: dict[str, VllmLeg] = {}
        self._left = Counter[str]()  # what the totals have of the legs that have left
        self._updates: list[tuple[str, Update]] = []

    @property
    def open(self) -> list[VllmLeg]:
        """The open legs."""
        return list(self._open.values())

    def find(self, request_id: str) -> VllmLeg | None:
        """An open leg, ``None`` for one that has left."""
        return self._open.get(request_id)

    def add(self, leg: VllmLeg) -> None:
        """Open a leg."""
        self._open[leg.id] = leg

    def queue_update(self, request_id: str, update: Update) -> None:
        """Queue an update."""
        self._updates.append((request_id, update))

    def take_updates(self) -> Sequence[tuple[str, Update]]:
        """The updates since the last call, each with its request id."""
        updates = self._updates
        self._updates = []
        return updates

    def note_admission(self, request_id: str, account: RequestAccount, now: float) -> None:
        """The first step of a leg begins."""
        leg = self._open.get(request_id)
        if leg is None or leg.first is not None:
            return
        leg.running = now
        leg.load_seconds = account.load_seconds
        admission = account.runs[0].admission
        leg.first = Admitted(admission, account.sources, account.missed)
        self.totals = self.totals.with_question(account.asked)
        self.queue_update(request_id, leg.first)

    def note_step(
        self, counts: Mapping[str, int], preempted: Collection[str], account_of: AccountOf
    ) -> None:
        """A step begins: count its positions and preemptions."""
        for request_id in (*counts, *preempted):
            leg = self._open.get(request_id)
            if leg is not None:
                self._count(leg, account_of(request_id))

    def note_token(self, leg: VllmLeg, now: float) -> None:
        """Count a token, and with the first one the leg's prompt."""
        leg.generated += 1
        self.totals = replace(self.totals, generated=self.totals.generated + 1)
        if leg.first_token is None and (first := leg.first) is not None:
            leg.first_token = now
            self.totals = self.totals.with_first_token(first.admission, first.sources, first.missed)

    def note_left(self, request_id: str, account: RequestAccount) -> None:
        """The request and its saves have ended."""
        leg = self._open.get(request_id)
        if leg is not None:
            leg.last = account

    def finish(self, leg: VllmLeg, finish: Finish | None) -> None:
        """The leg has its last token; ``None``: it is handed over."""
        leg.finished = True
        leg.finish = finish

    def ended(self) -> list[VllmLeg]:
        """The legs whose account is complete: that of a prefill leg after its last save."""
        return [
            leg
            for leg in self._open.values()
            if leg.finished and (leg.last is not None or not leg.order.prefill_only)
        ]

    def send_account(self, leg: VllmLeg, account_of: AccountOf) -> None:
        """Queue the account of a finished leg and close it."""
        account = account_of(leg.id) if leg.last is None else leg.last
        self._count(leg, account)
        self.queue_update(leg.id, _ended(leg, account))
        self._close(leg)

    def drop(self, leg: VllmLeg, account_of: AccountOf, now: float) -> None:
        """Close a leg without an account for its stream."""
        account = account_of(leg.id) if leg.last is None else leg.last
        self._count(leg, account)
        if leg.trace is not None:
            leg.trace.dropped(_ended(leg, account, now), now)
        if not leg.finished:
            leg.finish = Finish.ABORT
        self._close(leg)

    def audit(self, account_of: AccountOf) -> Iterator[Finding]:
        """I9: the totals are what the accounts of all legs sum to."""
        if not self.totals.adds_up:
            yield Finding("I9", None, f"sums by source do not add up: {self.totals}")
        sums = Counter(self._left)
        for leg in self._open.values():
            account = account_of(leg.id) if leg.last is None else leg.last
            self._note_failed(leg, account)
            sums.update(_countable(account))
        totals = asdict(self.totals)
        for name in SUMMED:
            if totals[name] != sums[name]:
                message = f"{name} is {totals[name]}, the legs' accounts sum to {sums[name]}"
                yield Finding("I9", None, message)

    def _note_failed(self, leg: VllmLeg, account: RequestAccount) -> None:
        """Count a load that has failed since the leg's last step."""
        now, before = _countable(account), leg.counted
        if all(now[name] == before.get(name, 0) for name in now if name != "failed"):
            self._count(leg, account)

    def _count(self, leg: VllmLeg, account: RequestAccount) -> None:
        """Add to the totals what is new in the leg's account."""
        now = _countable(account)
        new = {name: count - leg.counted.get(name, 0) for name, count in now.items()}
        leg.counted = now
        totals = self.totals
        self.totals = replace(
            totals,
            executed=totals.executed + new["executed"],
            recomputed=totals.recomputed + new["recomputed"],
            failed=totals.failed + new["failed"],
            preemptions=totals.preemptions + new["preemptions"],
        )

    def _close(self, leg: VllmLeg) -> None:
        del self._open[leg.id]
        self._left.update(leg.counted)
        self.totals = self.totals.with_leg(leg.finish)


def _ended(leg: VllmLeg, account: RequestAccount, until: float | None = None) -> Ended:
    return Ended(
        tokens=leg_tokens(account, leg.generated),
        timing=leg.timing(until),
        preemptions=account.preemptions,
        saved=account.saved,
        last_name=account.last_name,
        sources=account.sources,
        missed=account.missed,
    )


def leg_tokens(account: RequestAccount, generated: int) -> LegTokens:
    """The account of a leg that ``generated`` tokens."""
    return LegTokens(
        length=account.length,
        local=account.local,
        external=account.external,
        computed=account.computed,
        generated=generated,
        recomputed=account.recomputed,
        executed=account.executed,
        failed=account.failed,
        runs=account.runs,
    )


def _countable(account: RequestAccount) -> Mapping[str, int]:
    """The numbers of an account that ``Totals`` sums up, by the names of its fields."""
    return {name: getattr(account, name) for name in SUMMED}
