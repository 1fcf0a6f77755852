"""Retry: whether, where and when a request continues after a failed leg. Pure; time is passed in.

``RetryControl`` answers each failure with a ``RetryStep``, and the generation carries it out. A
failed leg continues on another worker within two limits: failures in all, and deaths of workers,
so that a request that kills its workers does not visit the whole fleet. Such a request is refused
for a while. A silent worker may be dying: its death counts once it is found, and before the limit
could be passed the request waits for that. Streams that lose their worker at the same moment
continue at a limited rate.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from kvrelay.errors import (
    DeadlineExceeded,
    Draining,
    Exhausted,
    KvrelayError,
    Mismatch,
    NotFound,
    Rejected,
    Unavailable,
    Unservable,
)
from kvrelay.v1 import types_pb2
from router.config import out_of_time
from router.generate.request import AcceptedRequest
from router.workers.health import WorkerLost, WorkerSilent

SERVED_WELL = 32  # tokens of one leg: a worker that dies later was not killed by the request
MAX_BACKOFF_SECONDS = 30.0
MAX_POISONS = 1024
DEATH_SECONDS = 30.0  # a silent worker that dies later did not die of the request
UNKNOWN: Mapping[str, float] = MappingProxyType({})


class PoisonRequest(KvrelayError):
    """Workers die while they serve this request."""


class RetryKind(Enum):
    """What follows from a failed leg for its worker; the metrics count by these names."""

    ELSEWHERE = "continue on another worker; this worker is healthy"
    SUSPECT = "continue on another worker; check this worker before it is used again"
    AGAIN = "wait, then continue on this worker or another one"


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Failures allowed to one request. ``internal`` bounds errors of unknown cause.

    ``silence``: seconds to wait, at most, until a silent worker answers or is found dead.
    """

    failures: int = 8
    deaths: int = 2
    internal: int = 1
    silence: float = 10.0


@dataclass(frozen=True, slots=True)
class FailedLeg:
    """A leg that ended with ``error`` after ``generated`` tokens.

    ``worker_id`` is the worker's boot token. ``streaming``: the client already has tokens of the
    request.
    """

    worker_id: str
    error: KvrelayError
    generated: int
    streaming: bool


@dataclass(frozen=True, slots=True)
class RetryStep:
    """What the generation does after a failed leg, in the order of the fields.

    ``backoff``: seconds for which the worker is given no new requests. ``suspect``: check the
    worker before it is used again. ``error``: the request ends with it. ``confirm``: check every
    worker before the next one is chosen. ``resume_at``: the time before which no leg begins.
    ``settle_until``: wait, at most until then, while the request is ``unsettled``.
    """

    backoff: float = 0.0
    suspect: bool = False
    error: KvrelayError | None = None
    confirm: bool = False
    resume_at: float = 0.0
    settle_until: float = 0.0


@dataclass(frozen=True, slots=True)
class LeftWorker:
    """A worker that may have died of a request, and when the request left it.

    ``silent``: the worker did not answer; otherwise its connection broke, or it was restarted.
    """

    at: float
    silent: bool


@dataclass(slots=True)
class Attempts:
    """The failures of one request. Workers are named by boot token.

    ``excluded`` workers get no other leg of the request; ``avoided`` workers only if there are no
    others. ``left``: those that may have died of the request.
    """

    excluded: set[str] = field(default_factory=set)
    avoided: set[str] = field(default_factory=set)
    left: dict[str, LeftWorker] = field(default_factory=dict)
    failures: int = 0
    internal: int = 0
    last: KvrelayError | None = None


class Trials:
    """The workers on which the samples of one request run, and those that may have died of it.

    A worker is on trial until it served a sample well. No more workers are on trial than may still
    die of the request: samples that run at the same moment would else kill more.
    """

    def __init__(self) -> None:
        self.left: dict[str, LeftWorker] = {}
        self._legs = Counter[str]()
        self._served: set[str] = set()

    def begin(self, key: str) -> None:
        """A leg begins on a worker."""
        self._legs[key] += 1

    def end(self, key: str) -> None:
        """A leg has ended there, and ``left`` has its worker if that may have died."""
        self._legs[key] -= 1

    def served(self, key: str, tokens: int = SERVED_WELL) -> None:
        """A leg has made so many tokens there."""
        if tokens >= SERVED_WELL:
            self._served.add(key)

    def among(self, spare: int) -> frozenset[str] | None:
        """The workers on which the next leg may begin; ``None``: any.

        ``spare``: how many more workers may die, as ``RetryControl.spare`` counts them.
        """
        running = {key for key, legs in self._legs.items() if legs} - self.left.keys()
        if len(running - self._served) < spare:
            return None
        return frozenset((running | self._served) - self.left.keys())


class TokenBucket:
    """At most ``burst`` tokens at once and ``rate`` a second in the long run."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._full_at = float("-inf")  # when it would be full again

    def take(self, now: float) -> float:
        """Take one token. Returns the seconds to wait before it may be used."""
        self._full_at = max(self._full_at, now) + 1.0 / self._rate
        return max(0.0, self._full_at - now - self._burst / self._rate)


class PoisonList:
    """Requests that killed workers, each refused for ``seconds``.

    A request is identified by tenant, prompt and sampling. The seed and the tokens so far do not
    count, so that a retry of the client is recognized.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._added: dict[bytes, float] = {}  # in order of time

    def add(self, request: AcceptedRequest, now: float) -> None:
        """Refuse the request from now on; beyond ``MAX_POISONS`` the oldest entry is dropped."""
        digest = _digest(request)
        self._added.pop(digest, None)
        self._added[digest] = now
        while len(self._added) > MAX_POISONS:
            del self._added[next(iter(self._added))]

    def check(self, request: AcceptedRequest, now: float) -> None:
        """Raise ``PoisonRequest`` for a request added in the last ``seconds``."""
        if not self._added:
            return  # the usual case costs nothing
        added = self._added.get(digest := _digest(request))
        if added is None:
            return
        left = added + self._seconds - now
        if left > 0:
            raise PoisonRequest(
                f"workers died while they served this request {now - added:.0f} s ago: it is"
                f" refused for {left:.0f} s more"
            )
        del self._added[digest]


class RetryControl:
    """Shared by all requests of a router: limits, poison requests, the rate of migrations."""

    def __init__(self, limits: RetryLimits, poisons: PoisonList, migrations: TokenBucket) -> None:
        self.poisons = poisons
        self._limits = limits
        self._bucket = migrations
        self.retried = Counter[str]()  # legs, by kind
        self.migrations = 0  # of these, legs of a request whose client already had tokens

    def failed(
        self,
        request: AcceptedRequest,
        attempts: Attempts,
        leg: FailedLeg,
        now: float,
        answered: Mapping[str, float] = UNKNOWN,
        died: Mapping[str, float] = UNKNOWN,
    ) -> RetryStep:
        """Note a failed leg in ``attempts``. Returns the step that follows.

        ``answered``: for each worker, when the last check that it answered began. A worker that
        answered a check begun after its connection broke did not die then. ``died``: when it was
        found dead.
        """
        error, settle_until = leg.error, 0.0
        if _final(error):
            return RetryStep(error=error)
        attempts.last = error
        kind = self._kind(attempts, leg)
        if kind is not RetryKind.AGAIN and not isinstance(error, Draining):
            refusal = self._count(attempts, leg, now)
            try:
                settle_until = self.recount(request, attempts, now, answered, died)
            except PoisonRequest as poison:
                refusal = poison
            if refusal is not None:
                return RetryStep(error=refusal)
        step = self._step(leg, kind, now, request.deadline.at)
        if settle_until:  # all workers are checked meanwhile
            confirm = isinstance(error, WorkerLost) and step.confirm
            step = replace(step, confirm=confirm, settle_until=settle_until)
        return step

    def recount(
        self,
        request: AcceptedRequest,
        attempts: Attempts,
        now: float,
        answered: Mapping[str, float],
        died: Mapping[str, float],
    ) -> float:
        """Count the deaths again. ``PoisonRequest`` once there are too many.

        Returns until when the request waits, since the deaths of silent workers that may be found
        by then would be too many; 0.0 if it need not wait.
        """
        deaths, open_until = self._deaths(attempts.left, now, answered, died)
        limit = self._limits.deaths
        if deaths >= limit:
            self.poisons.add(request, now)
            raise PoisonRequest(
                f"{deaths} workers died while they served this request, it is not tried again"
                f" (the last one: {attempts.last})"
            ) from attempts.last
        spare = limit - 1 - deaths  # deaths that could be found without refusing the request
        return sorted(open_until, reverse=True)[spare] if len(open_until) > spare else 0.0

    def spare(
        self,
        left: Mapping[str, LeftWorker],
        now: float,
        answered: Mapping[str, float],
        died: Mapping[str, float],
    ) -> int:
        """How many workers may still die of a request; silent ones count as dead meanwhile."""
        deaths, open_until = self._deaths(left, now, answered, died)
        return self._limits.deaths - deaths - len(open_until)

    def _deaths(
        self,
        left: Mapping[str, LeftWorker],
        now: float,
        answered: Mapping[str, float],
        died: Mapping[str, float],
    ) -> tuple[int, list[float]]:
        """The deaths, and until when each silent worker may still be found dead."""
        deaths, open_until = 0, []
        for key, one in left.items():
            if answered.get(key, one.at) > one.at:
                continue  # it lives
            if not one.silent or died.get(key, math.inf) <= one.at + DEATH_SECONDS:
                deaths += 1
            elif now < one.at + self._limits.silence:
                open_until.append(one.at + self._limits.silence)
        return deaths, open_until

    def _kind(self, attempts: Attempts, leg: FailedLeg) -> RetryKind:
        """The kind of retry. Adds the worker to the excluded or the avoided ones."""
        key, error = leg.worker_id, leg.error
        if isinstance(error, Exhausted) and leg.streaming:
            return RetryKind.AGAIN
        if isinstance(error, Draining):  # it may stop draining; a second such error excludes it
            (attempts.excluded if key in attempts.avoided else attempts.avoided).add(key)
            return RetryKind.SUSPECT
        (attempts.avoided if isinstance(error, Unavailable) else attempts.excluded).add(key)
        return RetryKind.ELSEWHERE if isinstance(error, Exhausted) else RetryKind.SUSPECT

    def _count(self, attempts: Attempts, leg: FailedLeg, now: float) -> KvrelayError | None:
        """Count a failure; the error that ends the request if there were too many."""
        error, limits = leg.error, self._limits
        attempts.failures += 1
        attempts.internal += type(error) is KvrelayError
        if _may_have_died(leg):  # two broken connections to a worker are one death
            silent = isinstance(error, WorkerSilent)
            attempts.left[leg.worker_id] = LeftWorker(now, silent)
        exceeded = attempts.failures > limits.failures or attempts.internal > limits.internal
        return error if exceeded else None

    def _step(self, leg: FailedLeg, kind: RetryKind, now: float, deadline: float) -> RetryStep:
        error = leg.error
        backoff = 0.0
        if isinstance(error, Exhausted):
            backoff = min(error.retry_after, MAX_BACKOFF_SECONDS)
        suspect = kind is RetryKind.SUSPECT
        if now >= deadline:
            late = out_of_time("before the stream could continue")
            return RetryStep(backoff, suspect, late)
        self.retried[kind.name.lower()] += 1
        self.migrations += leg.streaming
        resume_at = now + self._pause(error, kind, now)
        return RetryStep(backoff, suspect, None, _may_have_died(leg), resume_at)

    def _pause(self, error: KvrelayError, kind: RetryKind, now: float) -> float:
        if isinstance(error, Exhausted):
            return error.retry_after if kind is RetryKind.AGAIN else 0.0
        return self._bucket.take(now)


def _final(error: KvrelayError) -> bool:
    """Whether every worker would return the same error."""
    if isinstance(error, Mismatch):
        return error.field not in ("leg.namespace_digest", "role")  # another worker may fit
    return isinstance(error, Rejected | NotFound | Unservable | DeadlineExceeded)


def _may_have_died(leg: FailedLeg) -> bool:
    """Whether the request may have killed the worker."""
    return isinstance(leg.error, WorkerLost | WorkerSilent) and leg.generated < SERVED_WELL


def _digest(request: AcceptedRequest) -> bytes:
    sampling = types_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.ClearField("seed")
    prompt = struct.pack(f"<{len(request.prompt)}I", *request.prompt)
    parts = (request.tenant.name.encode(), sampling.SerializeToString(deterministic=True), prompt)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
