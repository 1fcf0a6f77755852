"""``kvrelay role``: turns a decode worker into a prefill worker, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from kvrelay.cli.router_options import RouterOptions
from kvrelay.cli.screen import print_out
from kvrelay.client.client import Client
from kvrelay.config.reader import load, option, required
from kvrelay.errors import DeadlineExceeded, Rejected, Unavailable
from kvrelay.fleet import WorkerStatus
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.rpc.protocol import ROLES
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import types_pb2, worker_pb2, worker_pb2_grpc

DESCRIPTION = """\
Switches a running worker to prefill or to decode. It refuses new requests, waits until its requests
have ended or the router has migrated them, and returns in the other role with its KV cache; with
requests left at the --timeout it keeps its role. The role lasts until the worker restarts; routers
notice the switch. The command asks the router first: without --force, the last worker that can
decode does not switch."""
ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig(RouterOptions):
    """The worker and its new role."""

    role: str = required(str, "the new role", choices=tuple(ROLES), positional=True)
    worker: str = required(str, "the worker", metavar="HOST:PORT")
    force: bool = option(False, "do not ask the router, even if no worker may be left to decode")
    timeout: float = option(120.0, "give up if it still has requests after this time", low=0.1)


def main(argv: Sequence[str]) -> int:
    config = load(RoleConfig, argv, "kvrelay role", DESCRIPTION)
    router, role = config.address(config.worker), ROLES[config.role]
    with open_sync_channel(config.worker) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=ASK_SECONDS).info
            if role == types_pb2.ROLE_PREFILL != info.role and not config.force:
                check_left(config.worker, info.worker_id, router, _known_by(router))
            stub.SetRole(worker_pb2.SetRoleRequest(role=role), timeout=config.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    print_out(f"{config.worker} is now a {config.role} worker.")
    return 0


def check_left(worker: str, boot: str, router: str, known: Sequence[WorkerStatus]) -> None:
    """``Rejected`` unless ``known`` holds the worker, and another one that can decode."""
    if all(_boot_of(one) != boot for one in known):
        raise Rejected(
            "router",
            f"the router at {router} does not know {worker}: name another router, or give --force",
        )
    others = [one for one in known if one.healthy and one.role == "decode"]
    if all(_boot_of(one) == boot for one in others):
        raise Rejected(
            "role",
            f"{worker} is the only worker that the router at {router} can use to decode; without"
            " one it refuses every request: start another worker, or give --force",
        )


def _boot_of(status: WorkerStatus) -> str | None:
    return None if status.info is None else status.info.worker_id


def _known_by(router: str) -> Sequence[WorkerStatus]:
    try:
        with Client(router) as client:
            return client.workers(ASK_SECONDS)
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(
            f"cannot ask the router at {router} which workers decode ({error}): name another one"
            " with --router, or give --force"
        ) from error
