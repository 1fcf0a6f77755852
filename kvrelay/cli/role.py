"""``kvrelay role``: makes a prefill worker of a decode worker, or the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from common.config import load, option, required
from kvrelay.cli.screen import say
from protos import worker_pb2, worker_pb2_grpc
from rpc import security
from rpc.channel import open_sync_channel
from rpc.credentials import ADMIN_FIRST
from rpc.options import SecurityOptions
from rpc.roles import ROLES
from rpc.status import from_rpc_error

DESCRIPTION = """\
Tells a running worker to prefill or to decode from now on. It takes no new requests, waits until
those it has ended or were moved elsewhere by the router, and comes back in the other role with its
KV cache. It keeps that role until it is started again; routers need not be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig(SecurityOptions):
    """Which worker, and what it is to be."""

    role: str = required(str, "its role from now on", choices=tuple(ROLES), positional=True)
    worker: str = required(str, "the worker", metavar="HOST:PORT")
    timeout: float = option(120.0, "give up when it still has requests after that", low=0.1)


def main(argv: Sequence[str]) -> int:
    config = load(RoleConfig, argv, "kvrelay role", DESCRIPTION)
    security.install(config, ADMIN_FIRST)
    request = worker_pb2.SetRoleRequest(role=ROLES[config.role])
    with open_sync_channel(config.worker) as channel:
        try:
            worker_pb2_grpc.WorkerStub(channel).SetRole(request, timeout=config.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    say(f"{config.worker} is a {config.role} worker.")
    return 0
