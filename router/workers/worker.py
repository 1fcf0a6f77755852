"""One worker as this router knows it: its channel, what it said of itself, what it was given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from kvrelay.errors import KvrelayError
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.keepalive import MIN_BYTES_PER_SECOND
from kvrelay.rpc.protocol import Role
from kvrelay.v1 import (
    decode_pb2_grpc,
    prefill_pb2_grpc,
    router_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.placement.policy import Candidate
from router.workers.fleet import belongs
from router.workers.health import UNASKED, HealthState, WorkerHealth
from router.workers.leg_call import LegCall

TELLING = 16 << 10  # bytes: how long so many take says how long more may
MARGIN = 8.0  # times as long


class KnownWorker:
    """``verdict``, ``info`` and ``load`` are what the last check found; its watcher writes them."""

    def __init__(self, address: str, listed: Role, options: ChannelOptions) -> None:
        self.address = address
        self.listed = listed  # unspecified for one that announced itself
        self.channel = open_channel(address, options)
        self.control = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self.channel)
        self.verdict: WorkerHealth = UNASKED
        self.since = 0.0  # when that began, and
        self.asked = 0.0  # when the last check that it answered did, in the same seconds
        self.heard = 0.0  # when it last said anything, in seconds of ``time.monotonic``
        self.rests_until = 0.0  # it said that it is full
        self.idle = asyncio.Event()  # no leg is there
        self.idle.set()
        self._stays: set[LegCall] = set()
        self._tokens = 0  # of all stays
        self._under_way = 0  # bytes of legs that have not arrived there yet
        self._slowness = 1 / MIN_BYTES_PER_SECOND  # seconds that one of them may take
        self.info = None
        self.load = worker_pb2.WorkerLoad()

    @property
    def info(self) -> worker_pb2.WorkerInfo | None:
        """What it said of itself; ``role`` is what it says, if it may, else as it is listed."""
        return self._info

    @info.setter
    def info(self, info: worker_pb2.WorkerInfo | None) -> None:
        self._info = info
        self.role = self.listed
        self.key = self.address
        self._candidate: Candidate | None = None
        if info is not None:
            self.role = info.role if belongs(info, self.listed) else self.listed
            self.key = info.worker_id

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        """What is on it."""
        return self._load

    @load.setter
    def load(self, load: worker_pb2.WorkerLoad) -> None:
        self._load = load
        self._candidate = None

    @property
    def usable(self) -> bool:
        """Whether it may be given legs."""
        return self._info is not None and self.verdict.state is HealthState.READY

    @property
    def problem(self) -> KvrelayError | None:
        """Why it is not used."""
        return self.verdict.problem

    @property
    def rest(self) -> float:
        """Seconds for which it wants no new requests."""
        return max(0.0, self.rests_until - time.monotonic())

    @property
    def legs(self) -> int:
        """How many this router has there."""
        return len(self._stays)

    def fits(self, positions: int) -> bool:
        """Whether a request that needs so many could ever run there."""
        return self.candidate().fits(positions)

    @property
    def transit(self) -> float:
        """Seconds that what is under way to it may take; whatever is said after it waits for it."""
        return self._under_way * self._slowness

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """A leg of so many bytes is under way to it."""
        self._under_way += size
        try:
            yield
        finally:
            self._under_way -= size

    def arrived(self, size: int, seconds: float) -> None:
        """A leg of so many bytes is there, after so long."""
        if size >= TELLING:
            self._slowness = min(1 / MIN_BYTES_PER_SECOND, MARGIN * seconds / size)

    def hear(self) -> None:
        """A message came: it is alive, whatever a check says."""
        self.heard = time.monotonic()

    @contextmanager
    def stay(self, tokens: int, positions: int) -> Iterator[LegCall]:
        """Counts a leg of so many tokens as being there, and makes it end if the worker is lost."""
        stay = LegCall(
            tokens, positions, self.channel.get_state() is grpc.ChannelConnectivity.READY
        )
        self._stays.add(stay)
        self._tokens = self._tokens + tokens
        self._candidate = None
        self.idle.clear()
        try:
            yield stay
        finally:
            self._stays.discard(stay)
            self._tokens = self._tokens - tokens
            self._candidate = None
            if not self._stays:
                self.idle.set()

    def evict(self, error: KvrelayError) -> int:
        """End every leg there, so that each goes on elsewhere; how many there were."""
        self._slowness = 1 / MIN_BYTES_PER_SECOND  # the way to it may have become slow
        for stay in self._stays:
            stay.evict(error)
        return len(self._stays)

    def move(self, others: Sequence[KnownWorker], error: KvrelayError) -> None:
        """End the legs there that could go on at one of ``others``."""
        for stay in self._stays:
            if any(other.fits(stay.positions) for other in others):
                stay.evict(error)

    def candidate(self) -> Candidate:
        """What the policy needs to know, read from messages anew only after a change."""
        if self._candidate is None:
            self._candidate = self._as_candidate()
        return self._candidate

    def _as_candidate(self) -> Candidate:
        info, load, own = self._info or worker_pb2.WorkerInfo(), self._load, self._tokens
        size, prefills = info.namespace.block_size, self.role == types_pb2.ROLE_PREFILL
        waiting = load.waiting_tokens
        return Candidate(
            key=self.key,
            # Other routers may send work too, and a check may be older than our own legs.
            legs=max(len(self._stays), load.waiting + load.loading + load.running),
            tokens=max(own, waiting),
            max_model_len=info.max_model_len,
            capacity=info.num_blocks * size,
            free=load.free_blocks * size if load.steps else None,
            queued=max(own, waiting) if prefills else waiting,
        )

    def status(self) -> router_pb2.WorkerStatus:
        """For ``ListWorkers``."""
        return router_pb2.WorkerStatus(
            address=self.address,
            info=self.info,
            healthy=self.usable,
            reason="" if self.problem is None else str(self.problem),
            in_flight=self.legs,
            state=self.verdict.state.value,
            load=self.load,
            role=self.role,
        )
