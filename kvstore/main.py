"""The process of the store: configuration, memory, server, until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging

from kvrelay.block.mac import BlockKey
from kvrelay.config.reader import load
from kvrelay.config.values import show_bytes, show_size
from kvrelay.process import logs
from kvrelay.process.memory import check_fits, host_memory
from kvrelay.rpc import tracing
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.server import exposition
from kvrelay.rpc.server.run import run_service, serve_until_signal
from kvrelay.rpc.server.server import Server, ServerOptions
from kvstore import metrics
from kvstore.config import StoreConfig
from kvstore.disk.tier import DiskOptions, DiskTier
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore, most_overhead
from kvstore.server.listener import ListenerOptions, TransportListener
from kvstore.server.prefault import Prefault
from kvstore.server.service import SERVICE_NAME, StoreService, register
from kvstore.server.tenants import TenantTable

log = logging.getLogger("kvrelay.store")

GRACE_SECONDS = 10.0
RESTORE_SECONDS = 3.0
"""How long the start waits for the blocks on disk to be found; the rest is found while serving."""

LAST_SECONDS = 2.0
"""For blocks that arrive while memory is written to disk."""

GC_THRESHOLDS = (20_000, 10, 500)
"""Blocks form no reference cycles, and a full collection among a million takes a second."""


async def serve(config: StoreConfig) -> int:
    """Serve until a signal; returns the exit status."""
    tracing.install(config, "store")
    try:
        return await _serve(config)
    finally:
        await asyncio.to_thread(tracing.end)


async def _serve(config: StoreConfig) -> int:
    if (warning := check_fits("budget", config.budget, host_memory())) is not None:
        log.warning("%s", warning)
    limits = StoreLimits(
        budget=config.budget,
        max_block=config.max_block,
        partial_life=config.partial_life,
        ticket_life=config.ticket_life,
        events=config.events,
        disk_budget=None if config.disk is None else config.disk_budget,
        eviction=config.eviction,
    )
    credentials = policy.installed().credentials
    tenants = TenantTable.of(credentials.tenants, config.budget)
    store = BlockStore(limits, tenants, BlockKey.of(credentials.fleet_key))
    disk = _disk(config, store)
    shared = config.shared and not tenants.owners  # a process that maps the memory reads it all
    plain = policy.installed().tls is None  # the socket transport is not encrypted
    sockets = config.socket and plain
    offered = ListenerOptions(
        config.host, config.socket_port, sockets, shared, config.shared_socket
    )
    listener = TransportListener(store, offered)
    service = StoreService(store, listener.transports, disk=disk)
    address = f"{config.host}:{config.port}"
    server = Server(ServerOptions(address))
    server.add(SERVICE_NAME, lambda bare: register(service, bare))

    def ready(bound: str) -> str:
        listener.start()
        gc.set_threshold(*GC_THRESHOLDS)
        if config.prefault:
            Prefault(store.arena.whole).start()
        log.info("blocks go by %s", ", ".join(listener.titles))
        log.info("eviction: %s", config.eviction)
        most = show_bytes(most_overhead(limits))
        log.info("bookkeeping takes up to about %s of memory besides the budget", most)
        size = show_size(config.budget)
        return f"store ready at {bound}, budget {size}, boot {store.boot.hex()}"

    async def flush(deadline: Deadline) -> None:
        if disk is not None:
            await asyncio.to_thread(disk.flush, min(config.flush_seconds, deadline.remaining()))

    if disk is not None:
        disk.start()
        await asyncio.to_thread(disk.wait_restored, RESTORE_SECONDS)
    grace = GRACE_SECONDS + (config.flush_seconds if disk is not None else 0.0)
    if config.metrics_port is not None:
        registry = metrics.registry_of(store.stats_of_tenants)
        exposition.serve(registry, config.metrics_host, config.metrics_port)
    status = await serve_until_signal(server, ready, flush, grace)
    listener.stop()
    if disk is not None:
        disk.flush(LAST_SECONDS)
        disk.close()
    return status


def _disk(config: StoreConfig, store: BlockStore) -> DiskTier | None:
    if config.disk is None or store.disk_index is None:
        return None
    options = DiskOptions(config.disk, config.disk_budget, config.restore)
    return DiskTier(options, store.disk_index, store.arena)


def main(argv: list[str]) -> int:
    """Parse, serve, return the exit status."""
    config = load(
        StoreConfig, argv, prog="python -m kvstore", description="The store of KV blocks."
    )
    logs.setup("store", config.log_level, form=config.log_format)
    return run_service(config, serve, _tenants_with_quotas)


def _tenants_with_quotas(known: Credentials) -> frozenset[Tenant]:
    """Their shares of the memory are divided at the start."""
    return frozenset(tenant for tenant in known.tenants if tenant.store_bytes is not None)
