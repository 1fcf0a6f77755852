"""The workers of this router, and which of them may be used.

A watcher checks each worker on an interval. The legs of a worker that is silent, unreachable or was
restarted are evicted at once and continue on other workers. Workers that do not belong to the fleet
stay listed and unused, with the field that keeps them out. The fleet's namespace is that of the
first accepted worker. It changes only when no worker with this namespace is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from kvrelay.errors import Draining, Exhausted, KvrelayError, Mismatch, Rejected, Unavailable
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import Role, role_name
from kvrelay.rpc.security.policy import installed
from kvrelay.v1 import types_pb2, worker_pb2
from router.config import RouterConfig
from router.workers.deaths import Deaths
from router.workers.fleet import check_key, check_worker
from router.workers.health import HealthState, WorkerHealth, WorkerLost, WorkerSilent
from router.workers.link import GrpcLink, WorkerLink
from router.workers.sources import HTTP, WorkerAddresses, WorkerSources
from router.workers.stock import StockLink
from router.workers.watch import Watcher
from router.workers.worker import KnownWorker

log = logging.getLogger("kvrelay.router")
RECONNECT_SECONDS = 0.5  # at most, between two attempts to reach a worker that was restarted
FOLLOW_SECONDS = 1.0  # between two reads of the sources
MAX_RETIRED = 64  # weights of workers no longer listed, remembered for --resume-wait
CONFIRM_SECONDS = 0.005  # between two looks at which workers answered
IN_USE = (HealthState.READY, HealthState.SUSPECT)
KEEPALIVE_SECONDS = 3.0  # checks are faster; this ends the calls that checks do not


class Registry:
    """The listed workers and their health. All methods run in the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._sources = WorkerSources(config)
        self._listed = WorkerAddresses((), ())  # as the sources were last
        self._workers: dict[tuple[Role, str], KnownWorker] = {}
        self._watchers: dict[tuple[Role, str], Watcher] = {}
        self._tasks: dict[tuple[Role, str], asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._left_out = 0
        self._deaths = Deaths()
        self._retired: dict[str, float] = {}  # weights of decode workers no longer listed: when
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self.lost = Counter[str]()  # by role: workers in use that died, or were silent for long
        self.ending = False  # this router ends, and maybe its cluster

    async def start(self) -> None:
        """Watch the workers listed; ``Rejected`` if the workers file cannot be used."""
        self._list(await self._sources.read())
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop watching and close every channel."""
        tasks = [*self._tasks.values(), *self._closing]
        tasks += [self._follower] if self._follower else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.link.close() for worker in self.workers))
        self._sources.close()

    def announce(self, address: str, ttl: float) -> KnownWorker:
        """List a worker that announced itself, and check it. ``Rejected``, ``Exhausted``."""
        listed = self._sources.announce(address, ttl)
        self._list(self._sources.now())
        announced = next((worker for worker in self.workers if worker.address == listed), None)
        if announced is None:
            raise Exhausted(f"{len(self._workers)} workers are listed: raise --max-workers", ttl)
        return announced

    def leave(self, address: str) -> None:
        """A worker has drained and ends: it is not lost, and forgotten if it announced itself.

        ``Rejected`` unless this router takes announcements.
        """
        self._sources.forget(address)
        for worker in self.workers:
            if worker.address == address:
                self._set_health(worker, WorkerHealth(HealthState.DRAINING, Draining("it ends")))
        self._list(self._sources.now())

    @property
    def workers(self) -> tuple[KnownWorker, ...]:
        """All listed workers, in listing order."""
        return tuple(self._workers.values())

    def lists(self, role: Role) -> bool:
        """Whether any worker of a role is listed, usable or not."""
        return any(worker.role == role for worker in self.workers)

    def usable(self, role: Role, numerics: str | None = None) -> list[KnownWorker]:
        """The workers of a role, and of a numeric profile if one is named, that may have legs."""
        every = self._workers.values()
        return [
            worker
            for worker in every
            if worker.role == role and numerics in (None, worker.numerics) and worker.usable
        ]

    def may_serve(self, weights: str) -> bool:
        """Whether a decode worker with the ``weights`` of a stream may become usable soon.

        One that had them is listed, or was a while ago, or one is listed that is not known yet.
        """
        if not weights:
            return False
        began = time.monotonic() - self._config.resume_wait
        if self._retired.get(weights, began) > began:
            return True
        listed = (w for w in self.workers if w.role == types_pb2.ROLE_DECODE)
        return any(
            not isinstance(w.problem, Mismatch) and (w.info is None or w.weights == weights)
            for w in listed
        )

    def members(self, role: Role) -> list[KnownWorker]:
        """The workers of a role that belong to the fleet, usable at the moment or not."""
        known = (w for w in self.workers if w.role == role and w.info is not None)
        return [worker for worker in known if not isinstance(worker.problem, Mismatch)]

    @property
    def answered(self) -> dict[str, float]:
        """By boot token, when the last check began that the worker answered."""
        listed = {worker.key: worker.answered_check for worker in self.workers}
        return self._deaths.answered | listed

    @property
    def died(self) -> dict[str, float]:
        """By boot token, when the worker was found dead."""
        return self._deaths.found

    @property
    def stores(self) -> bool:
        """Whether the workers share a store, through which they load each other's blocks."""
        return any(w.info is not None and bool(w.info.store) for w in self.workers if w.usable)

    async def wait_for(self, enough: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``enough`` holds after a change of any worker. Returns whether it holds."""
        while not enough():
            changed = self._changed
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await changed.wait()
            except TimeoutError:
                return enough()
        return True

    async def confirm(self, deadline: Deadline) -> None:
        """Check every worker now, and wait until all usable ones have answered.

        Afterwards a worker that died at the same moment as another one is no longer usable.
        """
        begun = time.monotonic()
        deadline = deadline.earlier(self._config.health_timeout)
        for watcher in self._watchers.values():
            watcher.check_now()
        while not deadline.expired:
            if all(worker.answered_check > begun for worker in self.workers if worker.usable):
                return
            await asyncio.sleep(CONFIRM_SECONDS)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change of any worker."""
        self._listeners.append(listener)

    def suspect(self, worker: KnownWorker, error: KvrelayError) -> None:
        """A leg failed on ``worker``: check it now, and use it again only after it has answered."""
        if worker.usable:
            self._set_health(worker, WorkerHealth(HealthState.SUSPECT, error))
        if watcher := self._watchers.get((worker.listed, worker.address)):
            watcher.check_now()

    def missing(self, role: Role) -> KvrelayError:
        """Why no worker of this role is usable: ``Mismatch`` if it keeps all of them out."""
        listed = [worker for worker in self.workers if worker.role == role]
        reasons = "; ".join(f"{w.address}: {w.problem}" for w in listed if w.problem is not None)
        reasons = reasons or f"{len(self.workers)} workers are listed, none of this role"
        message = f"no {role_name(role)} worker can be used now ({reasons})"
        refused = [w.problem for w in listed if isinstance(w.problem, Mismatch)]
        if listed and len(refused) == len(listed):
            return Mismatch(refused[0].field, message)
        return Unavailable(message)

    def _list(self, listed: WorkerAddresses) -> None:
        """Watch what the sources list now."""
        self._listed = listed
        self.update(listed)

    def update(self, listed: WorkerAddresses) -> None:
        """Watch exactly these workers; legs on workers no longer listed run to their end."""
        wanted = self._wanted(listed)
        for key in [key for key in self._workers if key not in wanted]:
            self._retire(key)
        options = ChannelOptions(
            max_message_bytes=self._config.message_bytes,
            max_reconnect_seconds=RECONNECT_SECONDS,
            keepalive_seconds=KEEPALIVE_SECONDS,
            keepalive_timeout_seconds=KEEPALIVE_SECONDS,
        )
        for role, address in wanted:
            if (role, address) not in self._workers:
                worker = KnownWorker(address, role, self._link(address, options))
                watcher = Watcher(worker, self._config, self._accept, self._judge, self._restarted)
                self._workers[role, address] = worker
                self._watchers[role, address] = watcher
                self._tasks[role, address] = asyncio.create_task(watcher.run())
        self._notify()

    def _link(self, address: str, options: ChannelOptions) -> WorkerLink:
        if not address.startswith(HTTP):
            return GrpcLink(address, options)
        config = self._config
        return StockLink(address, config.model, config.model_name, config.stock_seeds)

    def _wanted(self, listed: WorkerAddresses) -> list[tuple[Role, str]]:
        """The workers to watch, no more than allowed."""
        every = [(types_pb2.ROLE_PREFILL, address) for address in listed.prefill]
        every += [(types_pb2.ROLE_DECODE, address) for address in listed.decode]
        every += [(types_pb2.ROLE_UNSPECIFIED, address) for address in listed.announced]
        wanted = [key for key in dict.fromkeys(every) if self._may_call(key[1])]
        limit = self._config.max_workers
        if (left_out := max(0, len(wanted) - limit)) != self._left_out:
            log.warning("%d workers are listed, only %d are used", len(wanted), limit)
            self._left_out = left_out
        return wanted[:limit]

    def _may_call(self, address: str) -> bool:
        if address.startswith(HTTP):
            return True  # it is sent no token
        try:
            installed().check_call(address)
        except Rejected as error:
            log.warning("worker %s is left out: %s", address, error)
            return False
        return True

    def _retire(self, key: tuple[Role, str]) -> None:
        log.info("worker %s is no longer listed", key[1])
        del self._watchers[key]
        worker = self._workers[key]
        silent = worker.health.state is HealthState.SUSPECT
        if silent and worker.listed == types_pb2.ROLE_UNSPECIFIED:  # its announcement expired
            self.lost[role_name(worker.role)] += 1
        if worker.weights and worker.role == types_pb2.ROLE_DECODE:
            self._retired.pop(worker.weights, None)
            self._retired[worker.weights] = time.monotonic()
            while len(self._retired) > MAX_RETIRED:
                del self._retired[next(iter(self._retired))]
        closing = asyncio.create_task(self._outlive(self._workers.pop(key), self._tasks.pop(key)))
        self._closing.add(closing)  # the loop itself holds tasks weakly
        closing.add_done_callback(self._closing.discard)

    async def _outlive(self, worker: KnownWorker, watching: asyncio.Task[None]) -> None:
        """Watch a worker that is no longer listed until its last leg has ended."""
        try:
            await worker.idle.wait()
        finally:
            watching.cancel()
            await worker.link.close()

    async def _follow(self) -> None:
        """Look for changes in every source."""
        problem = ""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                listed, problem = await self._sources.read(), ""
            except Rejected as error:
                if problem != (problem := str(error)):  # each problem is logged once
                    log.warning("%s; the workers listed before stay", error)
                listed = self._sources.now()
            if listed != self._listed:
                self._list(listed)

    def _restarted(self, worker: KnownWorker, before: worker_pb2.WorkerInfo) -> None:
        """The worker has another boot token than ``before``: its legs are lost.

        It is used again once it is accepted.
        """
        changed = worker.info is not None and worker.info.role != before.role
        if not changed:
            self._deaths.note(before.worker_id, worker.answered_check, time.monotonic())
        why = Draining("it changed its role") if changed else WorkerLost("it was started again")
        self._set_health(worker, WorkerHealth(HealthState.STARTING, why))
        worker.evict(type(why)(f"{worker.address}: {why}"))

    def _accept(self, worker: KnownWorker, info: worker_pb2.WorkerInfo) -> None:
        check_key(info, installed().credentials.fleet_key_id)
        check_worker(info, worker.listed, self._config.model_name, self._fleet(worker))
        for other in self.workers:
            if other is not worker and other.usable and other.key == info.worker_id:
                raise Mismatch("address", f"this is the worker at {other.address}, listed twice")

    def _fleet(self, joining: KnownWorker) -> worker_pb2.Namespace | None:
        """The namespace in use. Suspect workers count: they may recover in a moment."""
        others = (w for w in self.workers if w is not joining and w.health.state in IN_USE)
        return next((other.info.namespace for other in others if other.info is not None), None)

    def _judge(self, worker: KnownWorker, health: WorkerHealth) -> None:
        """Apply the result of a check: evict a lost worker's legs, a draining one's if they fit.

        A draining one that is silent may go on, and would take no leg back.
        """
        health = self._joined(worker, health)
        if health.dead:
            self._deaths.note(worker.key, worker.answered_check, time.monotonic())
        elif not health.lost:
            self._deaths.disprove(worker.key)
        before = worker.health_since
        self._set_health(worker, health)
        suspect, decodes = health.state is HealthState.SUSPECT, worker.role == types_pb2.ROLE_DECODE
        drains = health.state is HealthState.DRAINING or (suspect and worker.load.draining)
        if drains and decodes:
            # Prefill legs end soon by themselves. A stream that fits on no other worker may end
            # here. Other workers count only if they answered since: they may be draining too.
            since = before if suspect else worker.health_since
            same = self.usable(worker.role, worker.numerics)
            staying = [w for w in same if w.answered_check > since]
            worker.evict_movable(staying, Draining(f"{worker.address} is draining"))
        elif health.lost and worker.legs:
            error = WorkerLost if health.state is HealthState.UNREACHABLE else WorkerSilent
            evicted = worker.evict(error(f"{worker.address}: {health.problem}"))
            log.warning("%d legs leave worker %s", evicted, worker.address)

    def _joined(self, worker: KnownWorker, health: WorkerHealth) -> WorkerHealth:
        """``health``, or the mismatch if another fleet became usable during the check."""
        if health.state is not HealthState.READY or worker.usable or worker.info is None:
            return health
        try:
            self._accept(worker, worker.info)
        except Mismatch as error:
            return WorkerHealth(HealthState.STARTING, error)
        return health

    def _set_health(self, worker: KnownWorker, health: WorkerHealth) -> None:
        """The one place that changes whether a worker is used."""
        if health.same_as(worker.health):
            return
        name, problem = role_name(worker.role), health.problem
        if problem is None:
            log.info("%s worker %s is used", name, worker.address)
        else:
            expected = worker.info is None or isinstance(problem, Draining)
            level = logging.INFO if expected else logging.WARNING  # it may still be starting
            if self.ending and not worker.legs:
                level = logging.DEBUG
            state = health.state.name.lower()
            log.log(level, "%s worker %s is %s: %s", name, worker.address, state, problem)
        if _loses(worker, health):
            self.lost[name] += 1
        if health.state is not worker.health.state:
            worker.health_since = time.monotonic()
        worker.health = health
        self._notify()

    def _notify(self) -> None:
        """Wake every task that waits for a change, and call the listeners."""
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()


def _loses(worker: KnownWorker, health: WorkerHealth) -> bool:
    """Whether ``worker``, that is in use, dies as it gets this health.

    One that was listed for this router and has no legs may have ended in order.
    """
    gone = health.state is HealthState.UNREACHABLE or isinstance(health.problem, WorkerLost)
    if not gone or worker.health.state not in IN_USE or health.state in IN_USE:
        return False
    announced = worker.listed == types_pb2.ROLE_UNSPECIFIED
    return announced or worker.legs > 0 or worker.health.state is HealthState.SUSPECT
