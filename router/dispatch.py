"""Finds the worker of a request's next leg: the pure policy fed with what the registry knows."""

from __future__ import annotations

import time

from common.errors import DeadlineExceeded, Exhausted, KvrelayError, Mismatch, Unavailable
from kvblock.name import Namer
from kvblock.namespace import Namespace
from protos import types_pb2, worker_pb2
from router.attempts import Attempts, Next
from router.budget import Bucket
from router.config import RouterConfig
from router.policy import DECODE, PREFILL, Affinity, Prefix, Wish, choose
from router.registry import Registry
from router.request import Request
from router.worker import KnownWorker, Role
from rpc.deadline import Deadline

MAX_NAMES = 1024
WEIGHTS = {types_pb2.ROLE_PREFILL: PREFILL, types_pb2.ROLE_DECODE: DECODE}


class Dispatcher:
    """Shared by all requests; it remembers which prefixes it sent where."""

    def __init__(self, registry: Registry, config: RouterConfig) -> None:
        self.registry = registry
        self._worker_wait, self._resume_wait = config.worker_wait, config.resume_wait
        self._affinity = {role: Affinity() for role in WEIGHTS}
        self._moves = Bucket(config.migration_rate, config.migration_burst)

    async def info(self, deadline: Deadline) -> worker_pb2.WorkerInfo:
        """What a worker that can finish requests says of itself; waits a while for one."""
        decode = types_pb2.ROLE_DECODE
        if isinstance(refused := self.registry.missing(decode), Mismatch):
            raise refused  # waiting would not mend it
        waiting = deadline.earlier(self._worker_wait)
        await self.registry.wait_for(lambda: bool(self.registry.usable(decode)), waiting)
        for worker in self.registry.usable(decode):
            if worker.info is not None:
                return worker.info
        deadline.check("to find a worker")
        raise self.registry.missing(decode)

    def prefix(self, request: Request, info: worker_pb2.WorkerInfo) -> Prefix:
        """Names of the prompt's full blocks; longer prefixes are not told apart."""
        ns = info.namespace
        namespace = Namespace(
            ns.model, ns.revision, ns.dtype, ns.layout, ns.block_size, ns.format_version
        )
        names = Namer(namespace).chain(request.prompt[: MAX_NAMES * ns.block_size], ns.block_size)
        return Prefix(tuple(names), ns.block_size)

    async def place(
        self, request: Request, prefix: Prefix, so_far: int, tried: Attempts
    ) -> KnownWorker:
        """A prefill worker for a request without tokens, if there is one; else a decode worker."""
        if not so_far:
            worker = self._choose(types_pb2.ROLE_PREFILL, request, prefix, so_far, tried)
            if worker is not None:
                return worker
            if isinstance(tried.last, Exhausted):
                raise tried.last  # decode workers stand in for missing ones, not for full ones
        return await self._decode_worker(request, prefix, so_far, tried)

    def pause(self, error: KvrelayError, what: Next) -> float:
        """Seconds to wait before a leg that failed goes on."""
        if isinstance(error, Exhausted):
            return error.retry_after if what is Next.AGAIN else 0.0
        return self._moves.take(time.monotonic())

    async def _decode_worker(
        self, request: Request, prefix: Prefix, so_far: int, tried: Attempts
    ) -> KnownWorker:
        seconds = self._resume_wait if so_far else self._worker_wait
        waiting = request.deadline.earlier(seconds)
        while True:
            worker = self._choose(types_pb2.ROLE_DECODE, request, prefix, so_far, tried)
            if worker is not None:
                return worker
            if isinstance(tried.last, Exhausted):
                raise tried.last
            if not await self.registry.wait_for(lambda: self._any_left(tried), waiting):
                raise self._none_left(request, tried)

    def _any_left(self, tried: Attempts) -> bool:
        usable = self.registry.usable(types_pb2.ROLE_DECODE)
        return any(worker.key not in tried.excluded for worker in usable)

    def _none_left(self, request: Request, tried: Attempts) -> KvrelayError:
        if request.deadline.expired:
            return DeadlineExceeded("no time left to find a worker")
        missing = self.registry.missing(types_pb2.ROLE_DECODE)
        if tried.last is not None:
            return Unavailable(f"no other worker to go on with ({tried.last})")
        return missing

    def _choose(
        self,
        role: Role,
        request: Request,
        prefix: Prefix,
        so_far: int,
        tried: Attempts,
    ) -> KnownWorker | None:
        """Raises ``Rejected`` when no decode worker could ever hold the request."""
        workers = {w.key: w for w in self.registry.usable(role) if w.key not in tried.excluded}
        candidates = [worker.candidate() for worker in workers.values()]
        if role == types_pb2.ROLE_PREFILL:  # a decode worker can do it too
            candidates = [c for c in candidates if c.fits(request.positions)]
        if not candidates:
            return None
        wish = Wish(
            tokens=len(request.prompt) + so_far,
            positions=request.positions,
            prefix=prefix,
            weights=WEIGHTS[role],
        )
        affinity = self._affinity[role]
        choice = choose(wish, candidates, affinity.leading(prefix.names))
        if choice is None:
            return None
        affinity.record(prefix.names, choice.key)
        return workers[choice.key]
