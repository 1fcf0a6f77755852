"""Finds the worker of a request's next leg: the pure policy fed with what the registry knows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import Role, role_name
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import types_pb2, worker_pb2
from router.config import RouterConfig
from router.generate.poison import PoisonList
from router.generate.request import AcceptedRequest
from router.generate.retry import Attempts, RetryKind
from router.generate.token_bucket import TokenBucket
from router.placement.affinity import Affinity
from router.placement.costs import ComputeSite, Costs, LegTimings
from router.placement.policies import policy
from router.placement.policy import DECODE, PREFILL, LegDemand, Prefix, too_long
from router.workers.registry import Registry
from router.workers.worker import KnownWorker

MAX_NAMES = 1024
KEPT = 256  # namespaces: one for each tenant with a salt
LONGEST_REST = 30.0  # seconds
STORE = "store"
STORED = 1 << 16  # names that the store is believed to hold
WEIGHTS = {types_pb2.ROLE_PREFILL: PREFILL, types_pb2.ROLE_DECODE: DECODE}


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker chosen, the work that the leg is there, and tokens thought to be held.

    ``hit`` by the worker, ``stored`` by the store. ``key`` and ``role`` are those of the worker
    chosen: at the same address another one may be by the time that the leg has ended.
    """

    worker: KnownWorker
    key: str
    role: Role
    hit: int
    work: int
    stored: int


def namespace_of(info: worker_pb2.WorkerInfo, tenant: Tenant) -> Namespace:
    """In which the blocks of a tenant are named, on any worker of the fleet."""
    told = info.namespace
    return _namespace(
        told.model,
        told.revision,
        told.dtype,
        told.layout,
        told.block_size,
        told.format_version,
        tenant.salt,
    )


@lru_cache(KEPT)
def _namespace(
    model: str, revision: str, dtype: str, layout: str, size: int, version: int, salt: bytes
) -> Namespace:
    """One object for all requests, which keeps its digest."""
    return Namespace(model, revision, dtype, layout, size, version).of_tenant(salt)


_namer = lru_cache(KEPT)(Namer)


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Blocks of a prefix that each worker is thought to hold, and tokens that any could fetch."""

    leading: Mapping[Role, Mapping[str, int]]
    stored: int


@dataclass(slots=True)
class PlacementStats:
    """Counts of a router's choices and of what came of them."""

    decisions: int = 0
    seconds: float = 0.0
    retried: Counter[str] = field(default_factory=Counter)  # by what was done
    migrations: int = 0


class Placer:
    """Shared by all requests; it remembers which prefixes it sent where, and what legs cost."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self.registry = registry
        self.costs = Costs()
        self.poisons = PoisonList(config.poison_seconds)
        self.tally = PlacementStats()
        self._mode = config.disaggregate
        self._policy = {role: policy(config.policy) for role in WEIGHTS}
        self._worker_wait = config.worker_wait
        self._resume_wait = config.resume_wait
        self._affinity = {role: Affinity() for role in WEIGHTS}
        self._stored = Affinity()
        self._moves = TokenBucket(config.migration_rate, config.migration_burst)

    async def info(self, deadline: Deadline) -> worker_pb2.WorkerInfo:
        """What a worker that can finish requests says of itself; waits a while for one."""
        decode = types_pb2.ROLE_DECODE
        if (told := self._told()) is not None:
            return told
        if isinstance(refused := self.registry.missing(decode), Mismatch):
            raise refused  # waiting would not mend it
        waiting = deadline.earlier(self._worker_wait)
        await self.registry.wait_for(lambda: bool(self.registry.usable(decode)), waiting)
        if (told := self._told()) is not None:
            return told
        deadline.check("to find a worker")
        raise self.registry.missing(decode)

    def _told(self) -> worker_pb2.WorkerInfo | None:
        usable = self.registry.usable(types_pb2.ROLE_DECODE)
        return next((worker.info for worker in usable if worker.info is not None), None)

    def prefix(self, request: AcceptedRequest, namespace: Namespace) -> Prefix:
        """Names of the prompt's full blocks; longer prefixes are not told apart."""
        size = namespace.block_size
        names = _namer(namespace).chain(request.prompt[: MAX_NAMES * size], size)
        return Prefix(tuple(names), size)

    def check_fits(self, request: AcceptedRequest) -> None:
        """``Rejected`` when no decode worker, of those away for now too, could hold the request."""
        members = self.registry.members(types_pb2.ROLE_DECODE)
        if members and not any(worker.fits(request.positions) for worker in members):
            raise too_long(request.positions, [worker.candidate() for worker in members])

    async def place(
        self, request: AcceptedRequest, prefix: Prefix, so_far: int, tried: Attempts
    ) -> Placed:
        """A prefill worker for a request without tokens, if that is worth it; else a decode one."""
        if not so_far and self._mode != "never":
            held = self._look(prefix)
            self._check_rest(types_pb2.ROLE_PREFILL, request, tried)
            found = self._choose(types_pb2.ROLE_PREFILL, request, prefix, so_far, tried, held)
            if found is not None and not self._direct(request, prefix, found, tried, held):
                return self._send(found, prefix)
            if found is None and isinstance(tried.last, Exhausted):
                raise tried.last  # decode workers stand in for missing ones, not for full ones
        return await self._decode_worker(request, prefix, so_far, tried)

    def _look(self, prefix: Prefix) -> PrefixHits:
        leading = {role: known.leading(prefix.names) for role, known in self._affinity.items()}
        stored = self._stored.leading(prefix.names).get(STORE, 0)
        return PrefixHits(leading, stored * prefix.block_size if self.registry.stores else 0)

    def _direct(
        self,
        request: AcceptedRequest,
        prefix: Prefix,
        prefill: Placed,
        tried: Attempts,
        held: PrefixHits,
    ) -> bool:
        """Whether a decode worker had better compute the prompt itself."""
        if self._mode != "auto":
            return False
        decode = self._choose(types_pb2.ROLE_DECODE, request, prefix, 0, tried, held)
        if decode is None:
            return False
        there, here = prefill.worker.candidate(), decode.worker.candidate()
        return self.costs.prefers_direct(
            len(request.prompt),
            ComputeSite(prefill.hit, held.stored, there.queued),
            ComputeSite(decode.hit, held.stored, here.queued, here.legs),
        )

    def _send(self, found: Placed, prefix: Prefix) -> Placed:
        info = found.worker.info
        capacity = info.num_blocks if info is not None else 0
        self._affinity[found.role].record(prefix.names, found.key, capacity)
        return found

    def learn(self, found: Placed, prefix: Prefix, leg: types_pb2.LegUsage) -> None:
        """Take in the account of a leg."""
        if leg.generated and not (leg.failed or leg.preemptions):
            account = LegTimings(leg.computed, leg.run_seconds, leg.external, leg.load_seconds)
            self.costs.learn(account)
        size = prefix.block_size
        if leg.local + size < found.hit:
            self._affinity[found.role].mistaken(leg.worker_id)
        if leg.local + leg.external + size < found.stored:
            self._stored.mistaken(STORE)
        self._stored.record(prefix.names[: leg.saved // size], STORE, STORED)

    def full(self, worker: KnownWorker, error: Exhausted) -> None:
        """It has no room: ask it nothing new for as long as it says."""
        worker.rests_until = time.monotonic() + min(error.retry_after, LONGEST_REST)

    def _left(self, role: Role, request: AcceptedRequest, tried: Attempts) -> list[KnownWorker]:
        """Workers that can be used, did not fail the request, and could hold it."""
        positions, excluded = request.positions, tried.excluded
        usable = self.registry.usable(role)
        return [w for w in usable if w.key not in excluded and w.fits(positions)]

    def _check_rest(self, role: Role, request: AcceptedRequest, tried: Attempts) -> None:
        """``Exhausted`` when every worker of a role is full; asking them again would not help."""
        left = [worker.rest for worker in self._left(role, request, tried)]
        if left and (shortest := min(left)) > 0:
            raise Exhausted(f"every {role_name(role)} worker is full", shortest)

    def pause(self, error: KvrelayError, what: RetryKind, begun: bool) -> float:
        """Seconds to wait before a leg that failed goes on; ``begun``: with tokens so far."""
        self.tally.retried[what.name.lower()] += 1
        self.tally.migrations += begun
        if isinstance(error, Exhausted):
            return error.retry_after if what is RetryKind.AGAIN else 0.0
        return self._moves.take(time.monotonic())

    async def _decode_worker(
        self, request: AcceptedRequest, prefix: Prefix, so_far: int, tried: Attempts
    ) -> Placed:
        seconds = self._resume_wait if so_far else self._worker_wait
        waiting = request.deadline.earlier(seconds)

        def any_left() -> bool:
            return bool(self._left(types_pb2.ROLE_DECODE, request, tried))

        while True:
            if not so_far:
                self._check_rest(types_pb2.ROLE_DECODE, request, tried)
            held = self._look(prefix)
            found = self._choose(types_pb2.ROLE_DECODE, request, prefix, so_far, tried, held)
            if found is not None:
                return self._send(found, prefix)
            if not so_far and isinstance(tried.last, Exhausted):
                raise tried.last  # an answer that has begun waits for its worker instead
            if not await self.registry.wait_for(any_left, waiting):
                raise self._none_left(request, tried)

    def _none_left(self, request: AcceptedRequest, tried: Attempts) -> KvrelayError:
        if request.deadline.expired:
            return DeadlineExceeded("no time left to find a worker")
        usable = self.registry.usable(types_pb2.ROLE_DECODE)
        if usable and not any(worker.fits(request.positions) for worker in usable):
            return Unavailable(
                f"no decode worker that holds {request.positions} positions can be used now"
            )
        if tried.last is not None:
            return Unavailable(f"no other worker to go on with ({tried.last})")
        return self.registry.missing(types_pb2.ROLE_DECODE)

    def _choose(
        self,
        role: Role,
        request: AcceptedRequest,
        prefix: Prefix,
        so_far: int,
        tried: Attempts,
        held: PrefixHits,
    ) -> Placed | None:
        """``None`` when no worker is left that could hold the request."""
        left = self._left(role, request, tried)
        if not so_far:  # an answer that has begun may knock again
            now = time.monotonic()
            left = [w for w in left if w.rests_until <= now]
        fresh = [w for w in left if w.key not in tried.avoided]
        # A prefill worker can be done without: none is asked again.
        again = left if role == types_pb2.ROLE_DECODE else []
        workers = {worker.key: worker for worker in fresh or again}
        candidates = [worker.candidate() for worker in workers.values()]
        if not candidates:
            return None
        wish = LegDemand(
            tokens=len(request.prompt) + so_far,
            positions=request.positions,
            prefix=prefix,
            weights=WEIGHTS[role],
            stored=held.stored,
        )
        begin = time.perf_counter()
        choice = self._policy[role].choose(wish, candidates, held.leading[role])
        self.tally.seconds += time.perf_counter() - begin
        self.tally.decisions += 1
        return (
            None
            if choice is None
            else Placed(workers[choice.key], choice.key, role, choice.hit, choice.work, held.stored)
        )
