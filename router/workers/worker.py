"""One worker as this router knows it: its link, its reports, its legs.

A call that the router itself cancels wakes its reader at once, so a stream leaves a silent worker
without a timer of its own and without any cost per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvrelay.errors import KvrelayError
from kvrelay.rpc.keepalive import MIN_BYTES_PER_SECOND
from kvrelay.rpc.protocol import Role
from kvrelay.v1 import router_pb2, types_pb2, worker_pb2
from router.workers.candidate import Candidate
from router.workers.fleet import belongs, weights_of
from router.workers.health import UNCHECKED, HealthState, WorkerHealth
from router.workers.link import WorkerLink

MIN_TIMED_BYTES = 16 << 10  # the arrival of a smaller leg says nothing about larger ones
TRANSIT_MARGIN = 8.0  # times the measured time


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class LegCall:
    """One leg on a worker and the call that carries it.

    ``work`` is what the leg counts for in placement, in tokens; ``positions`` is what its request
    needs on any worker. ``connected``: the channel was up when the leg began; if it was not, a
    failure of the connection says nothing about this request.
    """

    def __init__(self, work: int, positions: int, connected: bool) -> None:
        self.work = work
        self.positions = positions
        self.connected = connected
        self._evicted: KvrelayError | None = None
        self._call: _Cancellable | None = None

    def evict(self, error: KvrelayError) -> None:
        """End the leg: its reader gets ``error``."""
        self._evicted = self._evicted or error
        if self._call is not None:
            self._call.cancel()

    @contextmanager
    def reading(self, call: _Cancellable) -> Iterator[None]:
        """Read ``call`` inside; it ends with this block.

        The cancellation of an evicted leg becomes the error that it was evicted with.
        """
        self._call = call
        if self._evicted is not None:
            call.cancel()
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._evicted is None or (task is not None and task.cancelling()):
                raise
            raise self._evicted from None
        finally:
            call.cancel()  # without effect on a call that has ended


class KnownWorker:
    """``health``, ``info`` and ``load`` are results of the last check; the watcher writes them.

    Moments are of ``time.monotonic``. ``key`` is the boot token, and the address until the
    token is known.
    """

    def __init__(self, address: str, listed: Role, link: WorkerLink) -> None:
        self.address = address
        self.listed = listed  # unspecified for a worker that announced itself
        self.link = link
        self.health: WorkerHealth = UNCHECKED
        self.health_since = 0.0  # when its state began
        self.answered_check = 0.0  # when the last check began that the worker answered
        self.heard_at = 0.0  # when its last message of any leg arrived
        self.backoff_until = 0.0  # no new requests before: the worker reported that it is full
        self.idle = asyncio.Event()  # set while the worker has no legs
        self.idle.set()
        self._legs: set[LegCall] = set()
        self._work = 0  # of all legs
        self._bytes_under_way = 0  # of legs that have not arrived yet
        self._seconds_per_byte = 1 / MIN_BYTES_PER_SECOND
        self.info = None
        self.load = worker_pb2.WorkerLoad()

    @property
    def info(self) -> worker_pb2.WorkerInfo | None:
        """As last reported. Setting it sets ``role``: as reported if allowed, else as listed."""
        return self._info

    @info.setter
    def info(self, info: worker_pb2.WorkerInfo | None) -> None:
        self._info = info
        self._candidate: Candidate | None = None
        self.role = self.listed
        self.key = self.address
        self.numerics = ""  # the profile of its streams; empty with ``--numerics loose``
        self.weights = ""  # what its streams are bound to
        if info is not None:
            self.numerics = info.namespace.numerics
            self.weights = weights_of(info.namespace)
            self.role = info.role if belongs(info, self.listed) else self.listed
            self.key = info.worker_id

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        """As of the last check."""
        return self._load

    @load.setter
    def load(self, load: worker_pb2.WorkerLoad) -> None:
        self._load = load
        self._candidate = None

    @property
    def usable(self) -> bool:
        """Whether it may be given legs."""
        return self._info is not None and self.health.state is HealthState.READY

    @property
    def problem(self) -> KvrelayError | None:
        """Why it is not used."""
        return self.health.problem

    @property
    def legs(self) -> int:
        """Number of this router's legs on the worker."""
        return len(self._legs)

    def fits(self, positions: int) -> bool:
        """Whether a request of so many positions could ever run on the worker."""
        return self.candidate().fits(positions)

    @property
    def transit(self) -> float:
        """Seconds until the legs being sent have arrived; a check waits behind them."""
        return self._bytes_under_way * self._seconds_per_byte

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count a leg of ``size`` bytes as being sent inside this block."""
        self._bytes_under_way += size
        try:
            yield
        finally:
            self._bytes_under_way -= size

    def arrived(self, size: int, seconds: float) -> None:
        """A leg of ``size`` bytes took ``seconds`` to arrive."""
        if size >= MIN_TIMED_BYTES:
            self._seconds_per_byte = min(1 / MIN_BYTES_PER_SECOND, TRANSIT_MARGIN * seconds / size)

    def note_message(self) -> None:
        """Note that a message of a leg arrived: the worker is alive, even if a check fails."""
        self.heard_at = time.monotonic()

    @contextmanager
    def leg(self, work: int, positions: int) -> Iterator[LegCall]:
        """Count a leg on the worker inside this block; it is evicted if the worker is lost."""
        leg = LegCall(work, positions, self.link.connected)
        self._legs.add(leg)
        self._work += work
        self._candidate = None
        self.idle.clear()
        try:
            yield leg
        finally:
            self._legs.discard(leg)
            self._work -= work
            self._candidate = None
            if not self._legs:
                self.idle.set()

    def evict(self, error: KvrelayError) -> int:
        """End every leg, so that each continues on another worker. Returns their number."""
        self._seconds_per_byte = 1 / MIN_BYTES_PER_SECOND  # the network to it may have become slow
        for leg in self._legs:
            leg.evict(error)
        return len(self._legs)

    def evict_movable(self, others: Sequence[KnownWorker], error: KvrelayError) -> None:
        """End the legs that fit on one of ``others``."""
        for leg in self._legs:
            if any(other.fits(leg.positions) for other in others):
                leg.evict(error)

    def candidate(self) -> Candidate:
        """The worker as placement sees it, computed again only after a change."""
        if self._candidate is None:
            self._candidate = self._as_candidate()
        return self._candidate

    def _as_candidate(self) -> Candidate:
        info = self._info or worker_pb2.WorkerInfo()
        load = self._load
        block_size = info.namespace.block_size
        work = max(self._work, load.waiting_tokens)
        return Candidate(
            key=self.key,
            # Other routers may send legs too, and the last check may be older than our own legs.
            legs=max(len(self._legs), load.waiting + load.loading + load.running),
            tokens=work,
            max_model_len=info.max_model_len,
            capacity=info.num_blocks * block_size,
            free=load.free_blocks * block_size if load.steps else None,
            queued=work if self.role == types_pb2.ROLE_PREFILL else load.waiting_tokens,
        )

    def status(self) -> router_pb2.WorkerStatus:
        """For ``ListWorkers``."""
        return router_pb2.WorkerStatus(
            address=self.address,
            info=self.info,
            healthy=self.usable,
            reason="" if self.problem is None else str(self.problem),
            in_flight=self.legs,
            state=self.health.state.value,
            load=self.load,
            role=self.role,
        )
