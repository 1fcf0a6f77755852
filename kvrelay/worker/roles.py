"""The role of a worker, and its change while the worker runs.

A change drains the worker, gives it a new role and id, and reopens it; its KV pool stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from kvrelay.errors import DeadlineExceeded, Mismatch, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import NAMES, SERVICES, Role
from kvrelay.rpc.server.server import HealthService
from kvrelay.worker.streams import LegStreams

log = logging.getLogger(__name__)


class WorkerIdentity:
    """The role and the worker id, which is new at every start and every change of role.

    A router takes another id for another worker, so nothing it believed of the former role outlives
    the change.
    """

    def __init__(self, role: Role) -> None:
        self.started_as = role
        self.become(role)

    def become(self, role: Role) -> None:
        """Take a role, under a new id."""
        self._role = role
        self._id = secrets.token_hex(8)

    @property
    def role(self) -> Role:
        """The role of the legs that are accepted now."""
        return self._role

    @property
    def id(self) -> str:
        """The worker id."""
        return self._id

    @property
    def name(self) -> str:
        """The role as a word."""
        return NAMES[self._role]


class RoleSwitch:
    """Changes the role of a running worker, one change at a time."""

    def __init__(
        self, identity: WorkerIdentity, streams: LegStreams, health: HealthService
    ) -> None:
        self._identity = identity
        self._streams = streams
        self._health = health
        self._changing = asyncio.Lock()

    async def set(self, role: Role, deadline: Deadline) -> None:
        """Take a role once all legs of the former role have ended or moved.

        Without effect on a worker that has the role. Raises ``Mismatch`` if the worker is draining
        for good, and ``DeadlineExceeded``, with the role unchanged, if legs are still open.
        """
        if role not in NAMES:
            raise Rejected("role", "choose ROLE_PREFILL or ROLE_DECODE")
        async with self._changing:
            streams = self._streams
            if role == self._identity.role:
                return
            if streams.draining:
                raise Mismatch("draining", "this worker is shutting down and keeps its role")
            log.info("changing to a %s worker, %d legs are open", NAMES[role], streams.open)
            try:
                async with streams.emptied(deadline):
                    self._identity.become(role)
                    await self._set_health()
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{streams.open} legs are still open and the role is unchanged: raise the"
                    " call's timeout"
                ) from error
            log.info("changed to a %s worker", NAMES[role])

    async def _set_health(self) -> None:
        """Only the service of the role is healthy."""
        for role, service in SERVICES.items():
            await self._health.set(service, role == self._identity.role)
