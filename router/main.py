"""The process of the router: ``python -m router --help``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from prometheus_client import generate_latest

from kvrelay.config.reader import load
from kvrelay.process import logs
from kvrelay.rpc import tracing
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.server import exposition
from kvrelay.rpc.server.run import run_service, serve_until_signal
from kvrelay.rpc.server.server import CALL_SHARES, MAX_CALLS, Server, ServerOptions
from kvrelay.text.tokenizer import NoTokenizer, load_tokenizer
from kvrelay.v1 import router_pb2_grpc
from router.config import RouterConfig
from router.http.access import Access
from router.http.app import make_app
from router.http.connection.table import HttpLimits
from router.http.server import HttpServer
from router.metrics import registry_of
from router.queue.hint_sender import HintSender
from router.service import SERVICE, RouterService
from router.workers.registry import Registry

log = logging.getLogger("kvrelay.router")


def main(argv: Sequence[str]) -> int:
    """Run the router; the exit status."""
    config = load(RouterConfig, argv, "python -m router", "The router of kvrelay.")
    logs.setup("router", config.log_level, form=config.log_format)
    return run_service(config, serve)


async def serve(config: RouterConfig) -> int:
    """Serve until a signal; raises ``KvrelayError`` when it cannot begin."""
    tracing.install(config, "router")
    tokenizer = load_tokenizer(config.model, config.max_prompt)
    if isinstance(tokenizer, NoTokenizer):
        log.warning("%s has no tokenizer: only token ids go in and out", config.model)
    registry = Registry(config)
    service = RouterService(config, registry, tokenizer)
    server = make_server(config, service)
    sender = HintSender(config.store or "", service.hints)
    if config.metrics_port is not None:
        exposition.serve(registry_of(service), config.metrics_host, config.metrics_port)
    door = None if config.http_port is None else make_door(config, service, config.http_port)
    url = "" if door is None else f", {await door.start()}"
    hints = asyncio.create_task(sender.run())
    try:
        await registry.start()
        return await serve_until_signal(
            server,
            ready=lambda address: f"router ready on {address}{url}: {config.model_name}",
            on_stop=lambda _: _drain(service, door),
            grace=config.grace,
        )
    finally:
        if door is not None:
            await door.stop()
        hints.cancel()
        await asyncio.gather(hints, return_exceptions=True)
        await registry.close()
        await asyncio.to_thread(tracing.end)


async def _drain(service: RouterService, door: HttpServer | None) -> None:
    await service.gate.drain()
    if door is not None:
        await door.drained()


def make_door(config: RouterConfig, service: RouterService, port: int) -> HttpServer:
    """The HTTP server of the service, not started."""
    limits = HttpLimits(body_bytes=config.message_bytes, stuck_seconds=config.stuck_after)
    access = Access(lambda: installed().credentials, _max_calls(config))
    page = partial(generate_latest, registry_of(service))
    app = make_app(service, access, limits, page)
    return HttpServer(app, Address(config.host, port), limits)


def _max_calls(config: RouterConfig) -> int:
    return max(MAX_CALLS, CALL_SHARES * config.max_requests)  # each tenant may have a share


def make_server(config: RouterConfig, service: RouterService) -> Server:
    """A server with the service on it, not started."""
    options = ServerOptions(
        f"{config.host}:{config.port}",
        max_message_bytes=config.message_bytes,
        probe_bandwidth=False,
        stuck_seconds=config.stuck_after,  # before a worker, whose stream then stands too
        max_calls=_max_calls(config),
    )
    server = Server(options)
    server.add(
        SERVICE, lambda made: router_pb2_grpc.add_RouterServiceServicer_to_server(service, made)
    )
    return server
