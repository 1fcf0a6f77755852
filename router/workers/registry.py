"""The workers, and which of them may be used: asked who they are, and whether they are well.

A watcher per worker checks it on an interval; whoever is found silent, gone or restarted gives its
legs back at once, to go on elsewhere. Workers that do not belong to the fleet stay listed, unused,
with the field that keeps them out. The fleet's namespace is that of the first worker accepted; it
changes only when no worker of it is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvrelay.errors import Draining, Exhausted, KvrelayError, Mismatch, Rejected, Unavailable
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import Role, role_name
from kvrelay.rpc.security.policy import installed
from kvrelay.v1 import types_pb2, worker_pb2
from router.config import RouterConfig
from router.workers.fleet import check_key, check_worker
from router.workers.health import HealthState, WorkerHealth
from router.workers.loss import WorkerLost, WorkerSilent
from router.workers.sources import WorkerSources
from router.workers.watch import CheckIntervals, Watcher
from router.workers.worker import KnownWorker
from router.workers.workers_file import WorkerAddresses

log = logging.getLogger("kvrelay.router")
RECONNECT_SECONDS = 0.5  # at most, between two attempts to reach a worker that was started again
FOLLOW_SECONDS = 1.0
CONFIRM_SECONDS = 0.005  # between two looks at what was answered
KEEPALIVE_SECONDS = 3.0  # checks are faster; this ends what they might overlook


class Registry:
    """All methods are for the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._sources = WorkerSources(config)
        self._workers: dict[tuple[Role, str], KnownWorker] = {}
        self._pace = CheckIntervals(
            config.health_interval, config.health_timeout, config.gone_after
        )
        self._watchers: dict[tuple[Role, str], Watcher] = {}
        self._tasks: dict[tuple[Role, str], asyncio.Task[None]] = {}
        self._follower: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._left_out = 0
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Watch the workers listed; ``Rejected`` when the workers file cannot be used."""
        listed = await self._sources.read()
        self.update(listed)
        self._follower = asyncio.create_task(self._follow(listed))

    async def close(self) -> None:
        """Stop watching and close every channel."""
        tasks = [*self._tasks.values(), *self._closing]
        tasks += [self._follower] if self._follower else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.channel.close() for worker in self.workers))
        self._sources.close()

    def announce(self, address: str, ttl: float) -> KnownWorker:
        """A worker says that it serves there: list it, and ask it. ``Rejected``, ``Exhausted``."""
        listed = self._sources.hear(address, ttl)
        self.update(self._sources.now())
        found = next((worker for worker in self.workers if worker.address == listed), None)
        if found is None:
            raise Exhausted(f"this router lists {len(self._workers)} workers, no more", ttl)
        return found

    @property
    def workers(self) -> tuple[KnownWorker, ...]:
        """All of them, in the order of their listing."""
        return tuple(self._workers.values())

    def usable(self, role: Role) -> list[KnownWorker]:
        """Those of a role that may be given legs."""
        every = self._workers.values()
        return [worker for worker in every if worker.role == role and worker.usable]

    def members(self, role: Role) -> list[KnownWorker]:
        """Those of a role that belong to the fleet, whether they can be used now or not."""
        known = (w for w in self.workers if w.role == role and w.info is not None)
        return [worker for worker in known if not isinstance(worker.problem, Mismatch)]

    @property
    def answered(self) -> dict[str, float]:
        """By boot token, when the last check began that was answered."""
        return {worker.key: worker.asked for worker in self.workers}

    @property
    def stores(self) -> bool:
        """Whether the workers share a store, from which one fetches what another computed."""
        return any(w.info is not None and bool(w.info.store) for w in self.workers if w.usable)

    async def wait_for(self, enough: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``enough`` holds after a change of any worker; whether it does."""
        while not enough():
            changed = self._changed
            try:
                async with asyncio.timeout(deadline.remaining()):
                    await changed.wait()
            except TimeoutError:
                return enough()
        return True

    async def confirm(self, deadline: Deadline) -> None:
        """Ask every worker now, and wait until those that are used have answered.

        Who died at the same moment as another is not used any more then.
        """
        begun = time.monotonic()
        deadline = deadline.earlier(self._config.health_timeout)
        for watcher in self._watchers.values():
            watcher.hurry()
        while not deadline.expired:
            if all(w.asked > begun for w in self.workers if w.usable):
                return
            await asyncio.sleep(CONFIRM_SECONDS)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it after every change of any worker."""
        self._listeners.append(listener)

    def suspect(self, worker: KnownWorker, error: KvrelayError) -> None:
        """A leg there failed: do not use it until it answered a check, which is made at once."""
        if worker.usable:
            self._enter(worker, WorkerHealth(HealthState.SUSPECT, error))
        if watcher := self._watchers.get((worker.listed, worker.address)):
            watcher.hurry()

    def missing(self, role: Role) -> KvrelayError:
        """Why there is no worker of this role: ``Mismatch`` if that keeps all of them out."""
        listed = [worker for worker in self.workers if worker.role == role]
        told = "; ".join(f"{w.address}: {w.problem}" for w in listed if w.problem is not None)
        told = told or f"{len(self.workers)} workers are listed, none for that"
        message = f"no {role_name(role)} worker can be used now ({told})"
        refused = [w.problem for w in listed if isinstance(w.problem, Mismatch)]
        if listed and len(refused) == len(listed):
            return Mismatch(refused[0].field, message)
        return Unavailable(message)

    def update(self, listed: WorkerAddresses) -> None:
        """Start watching who is new, forget who is gone; legs under way there go on."""
        wanted = self._wanted(listed)
        for key in [key for key in self._workers if key not in wanted]:
            self._retire(key)
        options = ChannelOptions(
            max_message_bytes=self._config.max_message,
            max_reconnect_seconds=RECONNECT_SECONDS,
            keepalive_seconds=KEEPALIVE_SECONDS,
            keepalive_timeout_seconds=KEEPALIVE_SECONDS,
        )
        for role, address in wanted:
            if (role, address) not in self._workers:
                worker = KnownWorker(address, role, options)
                self._workers[role, address] = worker
                watcher = Watcher(worker, self._pace, self._accept, self._judge, self._restarted)
                self._watchers[role, address] = watcher
                self._tasks[role, address] = asyncio.create_task(watcher.run())
        self._tell()

    def _wanted(self, listed: WorkerAddresses) -> list[tuple[Role, str]]:
        """Who is to be watched, no more than allowed."""
        every = [(types_pb2.ROLE_PREFILL, address) for address in listed.prefill]
        every += [(types_pb2.ROLE_DECODE, address) for address in listed.decode]
        every += [(types_pb2.ROLE_UNSPECIFIED, address) for address in listed.announced]
        wanted = [key for key in dict.fromkeys(every) if self._may_call(key[1])]
        most = self._config.max_workers
        if (left_out := max(0, len(wanted) - most)) != self._left_out:
            log.warning("%d workers are listed, %d at most are used", len(wanted), most)
            self._left_out = left_out
        return wanted[:most]

    def _may_call(self, address: str) -> bool:
        try:
            installed().check_call(address)
        except Rejected as error:
            log.warning("worker %s is left out: %s", address, error)
            return False
        return True

    def _retire(self, key: tuple[Role, str]) -> None:
        log.info("worker %s is no longer listed", key[1])
        del self._watchers[key]
        outliving = self._outlive(self._workers.pop(key), self._tasks.pop(key))
        closing = asyncio.create_task(outliving)
        self._closing.add(closing)  # the loop itself holds tasks weakly
        closing.add_done_callback(self._closing.discard)

    async def _outlive(self, worker: KnownWorker, watching: asyncio.Task[None]) -> None:
        """Watch a worker that is no longer listed until its last leg has ended."""
        try:
            await worker.idle.wait()
        finally:
            watching.cancel()
            await worker.channel.close()

    async def _follow(self, known: WorkerAddresses) -> None:
        """Look for changes in every source."""
        problem = ""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                listed, problem = await self._sources.read(), ""
            except Rejected as error:
                if problem != (problem := str(error)):  # else it was told already
                    log.warning("%s; the workers listed before stay", error)
                listed = self._sources.now()
            if listed != known:
                known = listed
                self.update(listed)

    def _restarted(self, worker: KnownWorker, before: worker_pb2.WorkerInfo) -> None:
        """It has another boot token than ``before``: the legs it had are none of its own.

        It is another worker, and not used before it was judged as such.
        """
        changed = worker.info is not None and worker.info.role != before.role
        why = Draining("it changed its role") if changed else WorkerLost("it was started again")
        self._enter(worker, WorkerHealth(HealthState.STARTING, why))
        worker.evict(type(why)(f"{worker.address}: {why}"))

    def _accept(self, worker: KnownWorker, info: worker_pb2.WorkerInfo) -> None:
        check_key(info, installed().credentials.fleet_key_id)
        check_worker(info, worker.listed, self._config.model_name, self._fleet(worker))
        for other in self.workers:
            if other is not worker and other.usable and other.key == info.worker_id:
                raise Mismatch("address", f"this is the worker at {other.address}, listed twice")

    def _fleet(self, asking: KnownWorker) -> worker_pb2.Namespace | None:
        """The namespace in use; one who is only silent may be back in a moment and holds it too."""
        held = (HealthState.READY, HealthState.SUSPECT)
        others = (w for w in self.workers if w is not asking and w.verdict.state in held)
        return next((other.info.namespace for other in others if other.info is not None), None)

    def _judge(self, worker: KnownWorker, verdict: WorkerHealth) -> None:
        """A check found this. Whoever is lost gives its legs back; whoever leaves, its streams."""
        verdict = self._joined(worker, verdict)
        self._enter(worker, verdict)
        if verdict.lost and worker.legs:
            error = WorkerLost if verdict.state is HealthState.GONE else WorkerSilent
            moved = worker.evict(error(f"{worker.address}: {verdict.problem}"))
            log.warning("%d legs leave worker %s", moved, worker.address)
        elif verdict.state is HealthState.DRAINING and worker.role == types_pb2.ROLE_DECODE:
            # A prefill leg ends by itself, soon; a stream without another worker may end here.
            # Who may be leaving as well is asked first.
            stay = [w for w in self.usable(worker.role) if w.asked > worker.since]
            worker.move(stay, Draining(f"{worker.address} is draining"))

    def _joined(self, worker: KnownWorker, verdict: WorkerHealth) -> WorkerHealth:
        """The same, unless others of another fleet came to be used while this one was asked."""
        if verdict.state is not HealthState.READY or worker.usable or worker.info is None:
            return verdict
        try:
            self._accept(worker, worker.info)
        except Mismatch as error:
            return WorkerHealth(HealthState.STARTING, error)
        return verdict

    def _enter(self, worker: KnownWorker, verdict: WorkerHealth) -> None:
        """The one place that changes whether a worker is used."""
        if verdict.says_the_same(worker.verdict):
            return
        name, problem = role_name(worker.role), verdict.problem
        if problem is None:
            log.info("%s worker %s is used", name, worker.address)
        else:
            expected = worker.info is None or isinstance(problem, Draining)
            level = logging.INFO if expected else logging.WARNING  # the first may yet start
            state = verdict.state.name.lower()
            log.log(level, "%s worker %s is %s: %s", name, worker.address, state, problem)
        worker.verdict = verdict
        worker.since = time.monotonic()
        self._tell()

    def _tell(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()
