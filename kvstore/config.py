"""The configuration of the store service."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.reader import option
from kvrelay.errors import Rejected
from kvrelay.process.logs import FORMATS, LEVELS
from kvrelay.rpc.address import LOOPBACK
from kvrelay.rpc.tracing import TracingOptions
from kvstore.limits import (
    BUDGET,
    DISK_BUDGET,
    EVICTIONS,
    KEPT_EVENTS,
    MAX_BLOCK,
    PARTIAL_LIFE,
    TICKET_LIFE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(TracingOptions):
    """Flags, environment and file of the store."""

    host: str = option(LOOPBACK, "address to listen on", metavar="HOST")
    port: int = option(0, "port to listen on; 0 picks a free one", low=0, high=65535)
    budget: int = option(BUDGET, "memory for blocks", unit="bytes", low=1 << 10)
    max_block: int = option(MAX_BLOCK, "largest block accepted", unit="bytes", low=1 << 10)
    partial_life: float = option(PARTIAL_LIFE, "seconds an unused partial block is kept", low=0.1)
    ticket_life: float = option(TICKET_LIFE, "seconds a writer may pause", low=0.1)
    eviction: str = option(EVICTIONS[0], "eviction policy", choices=EVICTIONS)
    events: int = option(KEPT_EVENTS, "events kept for watchers", low=1, high=1 << 24)
    socket_port: int = option(
        0, "port of the socket transport; 0 picks a free one", low=0, high=65535
    )
    socket: bool = option(True, "do not offer the socket transport; TLS turns it off too")
    shared: bool = option(True, "do not offer shared memory to this user's local processes")
    shared_socket: str | None = option(
        None,
        "path of the Unix socket for shared memory, in a folder that other containers mount;"
        " default: an abstract socket, which only this network namespace reaches",
        metavar="FILE",
    )
    prefault: bool = option(True, "do not touch all memory in the background at start")
    disk: str | None = option(None, "directory to which blocks are written too", metavar="DIR")
    disk_budget: int = option(DISK_BUDGET, "bytes of --disk to use", unit="bytes", low=1 << 20)
    restore: bool = option(False, "start with the blocks that are in --disk")
    flush_seconds: float = option(
        10.0, "seconds to write memory to --disk after SIGTERM", low=0.0, high=600.0
    )
    metrics_port: int | None = option(
        None, "port for Prometheus; default: no metrics", low=1, high=65535
    )
    metrics_host: str = option(
        LOOPBACK,
        "address of the metrics: plain HTTP without a token on 127.0.0.1, else secured as others",
        metavar="HOST",
    )
    log_level: str = option("info", "least severe level to log", choices=LEVELS)
    log_format: str = option(
        "text", "json: one object a line, with date and request id", choices=FORMATS
    )

    def __post_init__(self) -> None:
        if self.shared_socket is not None and not self.shared_socket.startswith("/"):
            raise Rejected("shared_socket", f"must be an absolute path, got {self.shared_socket!r}")
        if self.disk == "":
            raise Rejected("disk", "is empty: give a directory, or leave it out")
        if self.restore and self.disk is None:
            raise Rejected("restore", "nothing can be restored without --disk DIR")
