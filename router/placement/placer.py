"""Places legs on workers: feeds the pure policy with what the registry knows of the workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.errors import Exhausted, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import Role, role_name
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import types_pb2, worker_pb2
from router.config import RouterConfig, out_of_time
from router.placement.affinity import Affinity
from router.placement.costs import ComputeSite, Costs, LegTimings
from router.placement.policy import DECODE, PREFILL, LegDemand, Prefix, choose
from router.workers.candidate import Candidate
from router.workers.fleet import same_but_numerics, weights_of
from router.workers.registry import Registry
from router.workers.worker import KnownWorker

log = logging.getLogger("kvrelay.router")
MAX_NAMES = 1024  # of a prompt; longer prefixes are not distinguished
MAX_NAMESPACES = 256  # cached: one for each tenant with a salt
STORE = "store"
STORED = 1 << 16  # names that the store is believed to hold
LOG_SECONDS = 10.0  # between two lines about prompts without a prefill worker
WEIGHTS = {types_pb2.ROLE_PREFILL: PREFILL, types_pb2.ROLE_DECODE: DECODE}


@dataclass(frozen=True, slots=True)
class StreamBinding:
    """The namespace of a stream's blocks: all its legs run on workers that have it.

    ``digest`` is that of the namespace with the tenant's salt, ``namer`` names its blocks.
    """

    weights: str
    numerics: str
    digest: bytes
    prefix: Prefix
    namer: Namer

    def names_of(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of all full blocks of the stream's prompt and output."""
        names, size = list(self.prefix.names), self.prefix.block_size
        for end in range((len(names) + 1) * size, len(tokens) + 1, size):
            parent = names[-1] if names else self.namer.root
            names.append(self.namer.child(parent, tokens[end - size : end]))
        return names


@dataclass(frozen=True, slots=True)
class NextLeg:
    """A leg to be placed: ``so_far`` output tokens exist, ``positions`` are needed in all.

    Workers, by boot token: ``excluded`` ones are not chosen, ``avoided`` ones only for decode and
    if there are no others; ``near`` is chosen if it can be; none but those ``among``, if given.
    ``last_error`` is how the leg before failed. ``computed``: the prompt's blocks can be found, and
    the client has tokens of another sample of this prompt.
    """

    prompt_tokens: int
    so_far: int
    positions: int
    bound: StreamBinding
    deadline: Deadline
    excluded: Set[str] = frozenset()
    avoided: Set[str] = frozenset()
    last_error: KvrelayError | None = None
    computed: bool = False
    near: str = ""
    among: frozenset[str] | None = None

    @property
    def begun(self) -> bool:
        """Whether the client has tokens of the request: the leg waits rather than fails."""
        return bool(self.so_far) or self.computed


@dataclass(frozen=True, slots=True)
class Placed:
    """The worker chosen, the work of the leg there, and tokens believed to be held.

    ``hit`` by the worker, ``stored`` by the store. ``key`` and ``role`` are those of the worker
    chosen: when the leg has ended, its address may have another worker.
    """

    worker: KnownWorker
    key: str
    role: Role
    hit: int
    work: int
    stored: int


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Blocks of a prefix that each worker is believed to hold, and tokens that any could fetch."""

    leading: Mapping[Role, Mapping[str, int]]
    stored: int


def namespace_of(info: worker_pb2.WorkerInfo, tenant: Tenant) -> Namespace:
    """The namespace of a tenant's blocks on every worker of the same numeric profile."""
    space = info.namespace
    return _namespace(
        space.model,
        space.revision,
        space.dtype,
        space.layout,
        space.block_size,
        space.format_version,
        space.numerics,
        info.fleet_key_id,
        tenant.salt,
    )


@lru_cache(MAX_NAMESPACES)
def _namespace(
    model: str,
    revision: str,
    dtype: str,
    layout: str,
    size: int,
    version: int,
    numerics: str,
    fleet: bytes,
    salt: bytes,
) -> Namespace:
    """One object for all requests, which keeps its digest."""
    space = Namespace(model, revision, dtype, layout, size, version, numerics, fleet)
    return space.of_tenant(salt)


_namer = lru_cache(MAX_NAMESPACES)(Namer)


class Placer:
    """Shared by all requests; it remembers which prefixes it sent where, and what legs cost."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self.costs = Costs()
        self.decisions = 0
        self.decision_seconds = 0.0
        self.mixed_numerics = 0  # legs that continued a stream on another numeric profile
        self._registry = registry
        self._mode = config.disaggregate
        self._worker_wait = config.worker_wait
        self._resume_wait = config.resume_wait
        self._affinity = {role: Affinity() for role in WEIGHTS}
        self._stored = Affinity()
        self._quiet_until = 0.0  # no line about prompts without a prefill worker before

    async def info(
        self, deadline: Deadline, weights: str = "", resumes: bool = False
    ) -> worker_pb2.WorkerInfo:
        """What a usable decode worker reports of itself; waits a while for one.

        One that serves the ``weights`` of a stream to resume, waiting longer if such a worker may
        come; else one of the numeric profile whose workers have the fewest legs.
        """
        if (info := self._decode_info(weights, patient=True)) is not None:
            return info
        registry, decode = self._registry, types_pb2.ROLE_DECODE
        if isinstance(refused := registry.missing(decode), Mismatch):
            raise refused  # waiting would not help
        resumes = resumes or bool(weights)
        waiting = deadline.earlier(self._resume_wait if resumes else self._worker_wait)
        await registry.wait_for(lambda: self._decode_info(weights, True) is not None, waiting)
        if (info := self._decode_info(weights)) is not None:
            return info
        deadline.check("to find a worker")
        raise registry.missing(decode)

    def candidates(self) -> list[Candidate]:
        """The decode workers of the fleet, unreachable ones included."""
        return [worker.candidate() for worker in self._registry.members(types_pb2.ROLE_DECODE)]

    def bind(
        self, info: worker_pb2.WorkerInfo, prompt: tuple[int, ...], tenant: Tenant
    ) -> StreamBinding:
        """Bind a stream to the namespace of a worker, with the first ``MAX_NAMES`` block names."""
        namespace, size = namespace_of(info, tenant), info.namespace.block_size
        namer = _namer(namespace)
        names = namer.chain(prompt[: MAX_NAMES * size], size)
        return StreamBinding(
            weights=weights_of(info.namespace),
            numerics=info.namespace.numerics,
            digest=namespace.digest if tenant.salt else info.namespace.digest,
            prefix=Prefix(tuple(names), size),
            namer=namer,
        )

    def rebind(
        self, bound: StreamBinding, prompt: tuple[int, ...], tenant: Tenant
    ) -> StreamBinding:
        """The binding of a stream without output: another one if no worker of its own is left."""
        if self._registry.usable(types_pb2.ROLE_DECODE, bound.numerics):
            return bound
        info = self._decode_info()
        return bound if info is None else self.bind(info, prompt, tenant)

    async def place(self, leg: NextLeg) -> Placed:
        """A prefill worker for a request without output, if that is worth it; else a decode one."""
        prefill = None if leg.begun or self._mode == "never" else self._prefill_worker(leg)
        placed = prefill or await self._decode_worker(leg)
        info = placed.worker.info
        capacity = info.num_blocks if info is not None else 0
        self._affinity[placed.role].record(leg.bound.prefix.names, placed.key, capacity)
        return placed

    def can_place(self, leg: NextLeg) -> bool:
        """Whether a decode worker for the leg can be used now."""
        return bool(self._left(types_pb2.ROLE_DECODE, leg))

    def learn(self, placed: Placed, prefix: Prefix, usage: types_pb2.LegUsage) -> None:
        """Take in the usage of a leg that ended."""
        if usage.generated and not (usage.failed or usage.preemptions):
            self.costs.learn(
                LegTimings(usage.computed, usage.run_seconds, usage.external, usage.load_seconds)
            )
        size = prefix.block_size
        if usage.local + size < placed.hit:
            self._affinity[placed.role].forget_half(usage.worker_id)
        if usage.local + usage.external + size < placed.stored:
            self._stored.forget_half(STORE)
        self._stored.record(prefix.names[: usage.saved // size], STORE, STORED)

    def _prefill_worker(self, leg: NextLeg) -> Placed | None:
        """``None``: a decode worker computes the prompt."""
        self._check_full(types_pb2.ROLE_PREFILL, leg)
        hits = self._hits(leg.bound.prefix)
        placed = self._choose(types_pb2.ROLE_PREFILL, leg, hits)
        if placed is not None:
            return None if self._is_direct_better(leg, placed, hits) else placed
        if isinstance(leg.last_error, Exhausted):
            raise leg.last_error  # decode workers stand in for missing ones, not for full ones
        self._log_stand_in(leg)
        return None

    def _log_stand_in(self, leg: NextLeg) -> None:
        """Log why a decode worker stands in for a prefill worker, at most every ``LOG_SECONDS``."""
        role, now = types_pb2.ROLE_PREFILL, time.monotonic()
        configured = self._mode == "always" or self._registry.lists(role)
        if not configured or now < self._quiet_until:
            return
        self._quiet_until = now + LOG_SECONDS
        usable = self._registry.usable(role)
        if not usable:
            why = str(self._registry.missing(role))
        elif not any(worker.numerics == leg.bound.numerics for worker in usable):
            why = f"no prefill worker has the stream's numeric profile {leg.bound.numerics!r}"
        elif not any(worker.fits(leg.positions) for worker in usable):
            why = f"no prefill worker holds {leg.positions} positions"
        else:
            why = f"no other prefill worker to try ({leg.last_error})"
        log.warning("a prompt is computed by a decode worker: %s", why)

    async def _decode_worker(self, leg: NextLeg) -> Placed:
        """Waits for one; a request with output waits longer."""
        waiting = leg.deadline.earlier(self._resume_wait if leg.begun else self._worker_wait)

        def is_any_left() -> bool:
            return self.can_place(leg)

        while True:
            if not leg.begun:
                self._check_full(types_pb2.ROLE_DECODE, leg)
            placed = self._choose(types_pb2.ROLE_DECODE, leg, self._hits(leg.bound.prefix))
            if placed is not None:
                return placed
            if not leg.begun and isinstance(leg.last_error, Exhausted):
                raise leg.last_error  # a request with output waits for its worker instead
            if not await self._registry.wait_for(is_any_left, waiting):
                raise self._none_left(leg)

    def _is_direct_better(self, leg: NextLeg, prefill: Placed, hits: PrefixHits) -> bool:
        """Whether the prompt is computed sooner by a decode worker itself."""
        if self._mode != "auto":
            return False
        decode = self._choose(types_pb2.ROLE_DECODE, leg, hits)
        if decode is None:
            return False
        there, here = prefill.worker.candidate(), decode.worker.candidate()
        return self.costs.prefers_direct(
            leg.prompt_tokens,
            ComputeSite(prefill.hit, hits.stored, there.queued),
            ComputeSite(decode.hit, hits.stored, here.queued, here.legs),
        )

    def _choose(self, role: Role, leg: NextLeg, hits: PrefixHits) -> Placed | None:
        """``None`` if no worker is left that could hold the request."""
        left = self._left(role, leg)
        if not leg.begun:  # a request with output may ask a full worker again
            now = time.monotonic()
            left = [worker for worker in left if worker.backoff_until <= now]
        fresh = [worker for worker in left if worker.key not in leg.avoided]
        # A prefill worker can be done without: none is asked twice.
        fallback = left if role == types_pb2.ROLE_DECODE else []
        near = [worker for worker in fresh if worker.key == leg.near]
        workers = {worker.key: worker for worker in near or fresh or fallback}
        candidates = [worker.candidate() for worker in workers.values()]
        if not candidates:
            return None
        demand = LegDemand(
            tokens=leg.prompt_tokens + leg.so_far,
            positions=leg.positions,
            prefix=leg.bound.prefix,
            weights=WEIGHTS[role],
            stored=hits.stored,
        )
        begin = time.perf_counter()
        choice = choose(demand, candidates, hits.leading[role])
        self.decision_seconds += time.perf_counter() - begin
        self.decisions += 1
        if choice is None:
            return None
        worker = workers[choice.key]
        return Placed(worker, choice.key, role, choice.hit, choice.work, hits.stored)

    def _left(self, role: Role, leg: NextLeg) -> list[KnownWorker]:
        """Workers that are usable, not excluded, and could hold the request."""
        usable = self._registry.usable(role, leg.bound.numerics)
        return [
            worker
            for worker in usable
            if worker.key not in leg.excluded
            and (leg.among is None or worker.key in leg.among)
            and worker.fits(leg.positions)
        ]

    def _check_full(self, role: Role, leg: NextLeg) -> None:
        """``Exhausted`` if every worker of a role is full; asking them again would not help."""
        left = self._left(role, leg)
        backoff = min((worker.backoff_until for worker in left), default=0.0) - time.monotonic()
        if backoff > 0:
            raise Exhausted(f"every {role_name(role)} worker is full", backoff)

    def _hits(self, prefix: Prefix) -> PrefixHits:
        leading = {role: known.leading(prefix.names) for role, known in self._affinity.items()}
        stored = self._stored.leading(prefix.names).get(STORE, 0)
        return PrefixHits(leading, stored * prefix.block_size if self._registry.stores else 0)

    def _decode_info(
        self, weights: str = "", patient: bool = False
    ) -> worker_pb2.WorkerInfo | None:
        """As ``info``, at once; if ``patient``, ``None`` while a better worker may come."""
        served: dict[str, list[KnownWorker]] = {}
        for worker in self._registry.usable(types_pb2.ROLE_DECODE):
            served.setdefault(worker.weights, []).append(worker)
        if not served:
            return None
        if weights in served:
            return served[weights][0].info
        every = list(served.values())
        if patient and weights and self._may_come(weights, every):
            return None
        return (every[0] if len(every) == 1 else min(every, key=_mean_legs))[0].info

    def _may_come(self, weights: str, served: Sequence[Sequence[KnownWorker]]) -> bool:
        """Whether a worker of the ``weights`` of a stream may come to a fleet of the same model."""
        infos = (workers[0].info for workers in served)
        same = any(info and same_but_numerics(weights, info.namespace) for info in infos)
        return same and self._registry.may_serve(weights)

    def _none_left(self, leg: NextLeg) -> KvrelayError:
        if leg.deadline.expired:
            return out_of_time("before a worker was found")
        usable = self._registry.usable(types_pb2.ROLE_DECODE)
        if usable and not any(worker.fits(leg.positions) for worker in usable):
            return Unavailable(
                f"no decode worker that holds {leg.positions} positions can be used now"
            )
        if usable and not self._registry.usable(types_pb2.ROLE_DECODE, leg.bound.numerics):
            return Mismatch(
                "numerics",
                f"the stream began on numeric profile {leg.bound.numerics!r}, and no decode worker"
                " of this profile can be used now: resume it later, or start it again",
            )
        if leg.last_error is not None:
            return Unavailable(f"no other worker to continue on ({leg.last_error})")
        return self._registry.missing(types_pb2.ROLE_DECODE)


def _mean_legs(workers: Sequence[KnownWorker]) -> float:
    return sum(worker.candidate().legs for worker in workers) / len(workers)
