"""The ``WorkerService``: information, load, drain, role and audit of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import grpc

from kvrelay.errors import DeadlineExceeded
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.worker.roles import RoleSwitch
from kvrelay.worker.worker import Worker

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
DRAIN_SECONDS = 600.0
AUDIT_SECONDS = 60.0

Q = TypeVar("Q")
R = TypeVar("R")
Context: TypeAlias = "grpc.aio.ServicerContext[Q, R]"  # generic in the type stubs only


@contextmanager
def _in_time(doing: str) -> Iterator[None]:
    """The deadline may pass here before gRPC has ended the call."""
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(f"no time left {doing}") from None


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Defined in protos/kvrelay/v1/worker.proto."""

    def __init__(self, worker: Worker, roles: RoleSwitch) -> None:
        self._worker = worker
        self._roles = roles

    async def GetInfo(
        self,
        request: worker_pb2.GetInfoRequest,
        context: Context[worker_pb2.GetInfoRequest, worker_pb2.GetInfoResponse],
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=self._worker.info())

    async def GetLoad(
        self,
        request: worker_pb2.GetLoadRequest,
        context: Context[worker_pb2.GetLoadRequest, worker_pb2.GetLoadResponse],
    ) -> worker_pb2.GetLoadResponse:
        load = self._worker.engine.load()
        message = worker_pb2.WorkerLoad(
            waiting=load.waiting,
            loading=load.loading,
            running=load.running,
            free_blocks=load.free_blocks,
            held_blocks=load.held_blocks,
            saving=load.saving,
            waiting_tokens=load.waiting_tokens,
            steps=load.steps,
            executed=load.executed,
            preemptions=load.totals.preemptions,
            draining=self._worker.streams.draining,
            worker_id=self._worker.identity.id,
        )
        return worker_pb2.GetLoadResponse(load=message)

    async def Drain(
        self,
        request: worker_pb2.DrainRequest,
        context: Context[worker_pb2.DrainRequest, worker_pb2.DrainResponse],
    ) -> worker_pb2.DrainResponse:
        deadline = Deadline.from_context(context, DRAIN_SECONDS, DRAIN_SECONDS)
        with _in_time("to drain: legs are still open"):
            await self._worker.streams.drain(deadline)
        return worker_pb2.DrainResponse()

    async def SetRole(
        self,
        request: worker_pb2.SetRoleRequest,
        context: Context[worker_pb2.SetRoleRequest, worker_pb2.SetRoleResponse],
    ) -> worker_pb2.SetRoleResponse:
        deadline = Deadline.from_context(context, DRAIN_SECONDS, DRAIN_SECONDS)
        await self._roles.set(request.role, deadline)
        return worker_pb2.SetRoleResponse(info=self._worker.info())

    async def Audit(
        self,
        request: worker_pb2.AuditRequest,
        context: Context[worker_pb2.AuditRequest, worker_pb2.AuditResponse],
    ) -> worker_pb2.AuditResponse:
        deadline = Deadline.from_context(context, AUDIT_SECONDS, AUDIT_SECONDS)
        future = asyncio.wrap_future(self._worker.engine.audit())
        with _in_time("to audit: the current step takes longer"):
            async with asyncio.timeout(deadline.remaining()):
                findings = await future
        return worker_pb2.AuditResponse(
            findings=[
                worker_pb2.AuditFinding(
                    invariant=finding.invariant,
                    request_id=finding.request_id or "",
                    message=finding.message,
                )
                for finding in findings
            ],
            requests=self._worker.streams.open,
            blocks=self._worker.opened.limits.num_blocks,
        )
