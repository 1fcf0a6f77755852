"""The workers, and which of them may be used: asked who they are, and whether they are well.

One task per worker asks ``grpc.health.v1`` and ``Worker.GetInfo`` on an interval, so a restart
(another boot token) is noticed. Workers that do not belong to the fleet stay listed, unused, with
the field that keeps them out. The fleet's namespace is that of the first worker accepted; it
changes only when no worker of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

from common.errors import DeadlineExceeded, KvrelayError, Mismatch, Rejected, Unavailable
from protos import types_pb2, worker_pb2
from router.config import RouterConfig
from router.fleet import check_worker
from router.worker import SERVICES, KnownWorker, Role
from router.workersfile import Workers, read_workers
from rpc.channel import ChannelOptions
from rpc.deadline import Deadline
from rpc.health import is_serving
from rpc.status import from_rpc_error

log = logging.getLogger("kvrelay.router")


class Registry:
    """All methods are for the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._workers: dict[tuple[Role, str], KnownWorker] = {}
        self._watchers: dict[tuple[Role, str], asyncio.Task[None]] = {}
        self._hurry: dict[tuple[Role, str], asyncio.Event] = {}
        self._file_watcher: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Watch the workers named; ``Rejected`` when the workers file cannot be used."""
        self.update(self._listed())
        if self._config.workers_file is not None:
            self._file_watcher = asyncio.create_task(self._watch_file())

    async def close(self) -> None:
        """Stop watching and close every channel."""
        tasks = [*self._watchers.values(), *self._closing]
        tasks += [self._file_watcher] if self._file_watcher else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.channel.close() for worker in self.workers))

    @property
    def workers(self) -> tuple[KnownWorker, ...]:
        """All of them, in the order of their listing."""
        return tuple(self._workers.values())

    def usable(self, role: Role) -> list[KnownWorker]:
        """Those of a role that may be given legs."""
        return [worker for worker in self.workers if worker.role == role and worker.usable]

    @property
    def namespace(self) -> worker_pb2.Namespace | None:
        """The fleet's, ``None`` while no worker is usable."""
        return next((w.info.namespace for w in self.workers if w.usable and w.info), None)

    async def wait_for(self, enough: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``enough`` holds after a change of any worker; whether it does."""
        while not enough():
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), deadline.remaining())
            except TimeoutError:
                return enough()
        return True

    def suspect(self, worker: KnownWorker, error: KvrelayError) -> None:
        """A leg there failed: do not use it until it answered a check, which is made at once."""
        self._judge(worker, error)
        if hurry := self._hurry.get((worker.role, worker.address)):
            hurry.set()

    def missing(self, role: Role) -> KvrelayError:
        """Why there is no worker of this role: ``Mismatch`` if that keeps all of them out."""
        listed = [worker for worker in self.workers if worker.role == role]
        told = "; ".join(f"{w.address}: {w.problem}" for w in listed if w.problem is not None)
        message = f"no {role_name(role)} worker can be used now ({told or 'none is listed'})"
        refused = [w.problem for w in listed if isinstance(w.problem, Mismatch)]
        if listed and len(refused) == len(listed):
            return Mismatch(refused[0].field, message)
        return Unavailable(message)

    def _listed(self) -> Workers:
        config, file = self._config, Workers((), ())
        if config.workers_file is not None:
            file = read_workers(Path(config.workers_file))
        return Workers((*config.prefill, *file.prefill), (*config.decode, *file.decode))

    def update(self, listed: Workers) -> None:
        """Start watching who is new, forget who is gone; legs under way there go on."""
        wanted = [(types_pb2.ROLE_PREFILL, address) for address in listed.prefill]
        wanted += [(types_pb2.ROLE_DECODE, address) for address in listed.decode]
        for key in [key for key in self._workers if key not in wanted]:
            log.info("worker %s is no longer listed", key[1])
            retired = self._workers.pop(key)
            self._watchers.pop(key).cancel()
            closing = asyncio.create_task(retired.channel.close(self._config.max_timeout))
            self._closing.add(closing)  # the loop itself holds tasks weakly
            closing.add_done_callback(self._closing.discard)
            del self._hurry[key]
        options = ChannelOptions(max_message_bytes=self._config.max_message)
        for role, address in wanted:
            if (role, address) not in self._workers:
                worker = KnownWorker(address, role, options)
                self._workers[role, address] = worker
                self._hurry[role, address] = hurry = asyncio.Event()
                self._watchers[role, address] = asyncio.create_task(self._watch(worker, hurry))
        self._tell()

    async def _watch_file(self) -> None:
        known = self._listed()
        while True:
            await asyncio.sleep(self._config.health_interval)
            try:
                listed = await asyncio.to_thread(self._listed)
            except Rejected as error:
                log.warning("%s; the workers listed before stay", error)
                continue
            if listed != known:
                known = listed
                self.update(listed)

    async def _watch(self, worker: KnownWorker, hurry: asyncio.Event) -> None:
        slow = False
        while True:
            hurry.clear()
            try:
                await self._ask(worker)
                self._judge(worker, None)
                slow = False
            except DeadlineExceeded as error:
                if slow:  # once may be a busy machine; a dead worker refuses the connection
                    self._judge(worker, error)
                slow = True
            except KvrelayError as error:
                self._judge(worker, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(hurry.wait(), self._config.health_interval)

    async def _ask(self, worker: KnownWorker) -> None:
        """Raise why the worker cannot be used; else its ``info`` is up to date."""
        deadline = Deadline.after(self._config.health_timeout)
        if not await is_serving(worker.channel, deadline, SERVICES[worker.role]):
            raise Unavailable("it says NOT_SERVING")
        try:
            request = worker_pb2.GetInfoRequest()
            info = await worker.control.GetInfo(request, timeout=deadline.remaining())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        if worker.info is not None and worker.info.worker != info.worker:
            log.info("worker %s was restarted (%s)", worker.address, info.worker)
        worker.info = info
        check_worker(info, worker.role, self._config.model_name, self._fleet(worker))

    def _fleet(self, asking: KnownWorker) -> worker_pb2.Namespace | None:
        others = (w for w in self.workers if w is not asking and w.usable and w.info is not None)
        return next((other.info.namespace for other in others if other.info), None)

    def _judge(self, worker: KnownWorker, problem: KvrelayError | None) -> None:
        """The one place that changes whether a worker is used."""
        if str(problem) == str(worker.problem):
            return
        if problem is None:
            log.info("%s worker %s is used", role_name(worker.role), worker.address)
        else:
            name = role_name(worker.role)
            level = logging.INFO if worker.info is None else logging.WARNING  # it may yet start
            log.log(level, "%s worker %s is not used: %s", name, worker.address, problem)
        worker.problem = problem
        self._tell()

    def _tell(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


def role_name(role: Role) -> str:
    """As in flags and logs."""
    return types_pb2.Role.Name(role).removeprefix("ROLE_").lower()
