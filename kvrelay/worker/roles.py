"""Changes the role of a running worker: drained, renamed, and open again, with its KV kept."""

from __future__ import annotations

import asyncio
import logging

from kvrelay.errors import DeadlineExceeded, Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import NAMES, SERVICES, Role
from kvrelay.rpc.server.server import HealthService
from kvrelay.worker.worker import Worker

log = logging.getLogger(__name__)


class RoleSwitch:
    """One change at a time."""

    def __init__(self, worker: Worker, health: HealthService) -> None:
        self._worker = worker
        self._health = health
        self._changing = asyncio.Lock()

    async def tell(self) -> None:
        """Health: only the service of the role is served."""
        for role, service in SERVICES.items():
            await self._health.set(service, role == self._worker.identity.role)

    async def set(self, role: Role, deadline: Deadline) -> None:
        """Take a role when the legs of the one before have ended or were moved.

        Without effect on a worker that has it. ``Mismatch`` for one that is leaving, and
        ``DeadlineExceeded`` when legs are left: then it goes on as it was.
        """
        if role not in NAMES:
            raise Rejected("role", "choose ROLE_PREFILL or ROLE_DECODE")
        async with self._changing:
            worker = self._worker
            if role == worker.identity.role:
                return
            if worker.streams.draining:
                raise Mismatch("draining", "this worker is leaving and keeps its role")
            log.info("to be a %s worker, %d legs are under way", NAMES[role], worker.streams.open)
            try:
                async with worker.streams.emptied(deadline):
                    worker.identity.become(role)
                    await self.tell()
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{worker.streams.open} legs are under way still, the role is as before: allow"
                    " more time"
                ) from error
            log.info("a %s worker from now on", NAMES[role])
