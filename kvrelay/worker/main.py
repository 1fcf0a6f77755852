"""The process of a worker: configuration, model, server, until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from kvrelay.config.reader import load
from kvrelay.process import logs
from kvrelay.rpc import tracing
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import NAMES, Role
from kvrelay.rpc.security import policy
from kvrelay.rpc.server import exposition
from kvrelay.rpc.server.run import run_service, serve_until_signal
from kvrelay.rpc.server.server import Server, ServerOptions
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.worker import metrics
from kvrelay.worker.announce import Announcer, label
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.roles import RoleSwitch
from kvrelay.worker.service import SERVICE, WorkerService
from kvrelay.worker.worker import Worker

log = logging.getLogger(__name__)

Register = Callable[[Server, Worker], None]


def main(role: Role, services: Sequence[Register], argv: Sequence[str]) -> int:
    """Run a worker and return the exit status. ``services`` add the services of both roles."""
    name = NAMES[role]
    config = load(WorkerConfig, argv, f"python -m {name}_service", f"The {name} worker of kvrelay.")
    logs.setup(name, config.log_level, form=config.log_format)
    return run_service(config, lambda config: _serve(Worker.build(config, role), services))


async def _serve(worker: Worker, services: Sequence[Register]) -> int:
    config = worker.config
    tracing.install(config, NAMES[worker.identity.started_as])
    if not Address(config.host, config.port).local:
        policy.installed().check_signed()
    server = Server(ServerOptions(f"{config.host}:{config.port}"))
    service = WorkerService(worker, RoleSwitch(worker.identity, worker.streams, server.health))
    server.add(
        SERVICE, lambda made: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, made)
    )
    for register in services:
        register(server, worker)
    announcer = Announcer(config.routers, config.advertise)

    def ready(address: str) -> str:
        if config.metrics_port is not None:
            exposition.serve(_metrics(worker, address), config.metrics_host, config.metrics_port)
        announcer.begin(address)
        return _ready(worker, address)

    worker.start()
    try:
        return await serve_until_signal(
            server,
            ready=ready,
            on_stop=lambda deadline: _leave(worker, announcer, deadline),
            grace=config.grace,
        )
    finally:
        announcer.end()
        await asyncio.to_thread(worker.engine.close)
        await asyncio.to_thread(tracing.end)
        sys.stdout.flush()


def _metrics(worker: Worker, bound: str) -> CollectorRegistry:
    config, address = worker.config, Address.parse(bound)
    labels = {
        "model_name": worker.opened.namespace.model,
        "worker": label(address.host, address.port or 0, config.advertise),
        "role": NAMES[worker.identity.started_as],  # one series, whatever its role becomes
    }
    return metrics.registry_of(
        worker.engine,
        labels,
        worker.histograms,
        worker.opened.store_counters,
        config.store is not None,
    )


def _ready(worker: Worker, address: str) -> str:
    opened = worker.opened
    model, limits = opened.model, opened.limits
    return (
        f"{worker.identity.name} worker ready on {address}: {model.name} {model.dtype} on"
        f" {model.device}, attention {opened.attention}, threads {opened.threads},"
        f" {limits.num_blocks} blocks of {limits.block_size}"
    )


async def _leave(worker: Worker, announcer: Announcer, deadline: Deadline) -> None:
    log.info("draining, %d open legs", worker.streams.open)
    await worker.streams.drain(deadline)
    await announcer.leave()
