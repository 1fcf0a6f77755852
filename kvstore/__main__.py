"""``python -m kvstore``: the store as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from common import logs
from common.config import load, option
from common.values import show_size
from kvstore.service import NAME, Limits, StoreService, register
from rpc.server import Server, ServerOptions, serve_until_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Configuration of the store service."""

    host: str = option("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = option(0, "port to listen on; 0 picks a free one", low=0, high=65535)
    budget: int = option(1 << 30, "memory for blocks", unit="bytes", low=1 << 10)
    max_block: int = option(256 << 20, "largest block taken", unit="bytes", low=1 << 10)
    partial_life: float = option(60.0, "seconds an unused partial block is kept", low=0.1)
    ticket_life: float = option(30.0, "seconds a writer may stand still", low=0.1)
    allow_insecure: bool = option(False, "listen on other than loopback without encryption")
    log_level: str = option("info", "least severe level to log", choices=logs.LEVELS)


async def serve(config: StoreConfig) -> int:
    """Until a signal; the exit status."""
    limits = Limits(config.budget, config.max_block, config.partial_life, config.ticket_life)
    service = StoreService(limits)
    address = f"{config.host}:{config.port}"
    server = Server(ServerOptions(address, allow_insecure=config.allow_insecure))
    server.add(NAME, lambda bare: register(service, bare))

    def ready(bound: str) -> str:
        size = show_size(config.budget)
        return f"store ready at {bound}, budget {size}, boot {service.boot.hex()}"

    return await serve_until_signal(server, ready)


def main(argv: list[str]) -> int:
    """Parse, serve, return the exit status."""
    config = load(
        StoreConfig, argv, prog="python -m kvstore", description="The store of KV blocks."
    )
    logs.setup("store", config.log_level)
    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
