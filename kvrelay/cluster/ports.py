"""Free TCP ports, and how to reserve them until a server binds them.

Free ports lie below the kernel's range for outgoing connections, which takes ports from ``bind(0)``
before their server binds them. ``kvrelay.rpc.reserved`` says what a reservation is. Reserving works
on Linux only: elsewhere another process can take the port of a server that starts or restarts.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Rejected, Unavailable
from kvrelay.rpc.address import LOOPBACK, Address
from kvrelay.rpc.reserved import SUPPORTED, bind, reserve

log = logging.getLogger("kvrelay.cluster")
MIN_PORT = 10240
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 1000
OTHER_LOOPBACK = {"127.0.0.1": "::1", "::1": "127.0.0.1"}


def free_ports(count: int, host: str = LOOPBACK, without: Container[int | None] = ()) -> list[int]:
    """Distinct ports, none of them in ``without``, that are not reserved or listened on."""
    found: list[int] = []
    for _ in range(TRIES):
        if len(found) == count:
            return found
        port = random.randrange(MIN_PORT, _highest())
        if port in without or port in found:
            continue
        if (held := bind(host, port, reuse_address=False)) is not None:
            held.close()
            found.append(port)
    raise Unavailable(f"no {count} free ports on {host} between {MIN_PORT} and {_highest()}")


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on the port now."""
    probe = bind(host, port, reuse_address=True)
    if probe is not None:
        probe.close()
    return probe is not None


@dataclass(frozen=True, slots=True)
class WantedPort:
    """A port to reserve; ``field`` and ``instead`` are for the error if it is taken.

    A ``public`` port is also reserved on the other loopback address, to which clients may resolve
    ``localhost``.
    """

    host: str
    port: int
    field: str = "port"
    instead: str = "use another port"
    public: bool = False


class ReservedPorts:
    """Ports reserved for servers that start, and restart after a crash, until ``close``."""

    def __init__(self, ports: Iterable[WantedPort]) -> None:
        """Raises ``Rejected`` naming the first port that another process has."""
        self._sockets: list[socket.socket] = []
        fields: dict[int, str] = {}
        for wanted in ports:
            held = reserve(wanted.host, wanted.port)
            if held is None:
                self.close()
                if wanted.port in fields:
                    raise Rejected(
                        wanted.field,
                        f"{wanted.port} is also the value of {fields[wanted.port]}: use another",
                    )
                if (possible := bind(wanted.host, 0, reuse_address=False)) is None:
                    raise Rejected("host", f"{wanted.host} is no address of this machine")
                possible.close()
                taken = f"{wanted.port} on {wanted.host} is taken"
                raise Rejected(wanted.field, f"{taken}: stop that process, or {wanted.instead}")
            fields[wanted.port] = wanted.field
            self._keep(held, wanted.host, wanted.port)
            if wanted.public and wanted.host in OTHER_LOOPBACK:
                self._reserve_other(OTHER_LOOPBACK[wanted.host], wanted.port)

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

    def _reserve_other(self, host: str, port: int) -> None:
        held = reserve(host, port)
        if held is not None:
            self._keep(held, host, port)
        elif (possible := bind(host, 0, reuse_address=False)) is not None:
            possible.close()
            log.warning(
                "another process has %s: clients that call localhost:%d may reach it",
                Address(host, port),
                port,
            )

    def _keep(self, held: socket.socket, host: str, port: int) -> None:
        """Hold the reservation if a server can still bind the port."""
        if SUPPORTED and (server := bind(host, port, reuse_address=True, reuse_port=True)):
            server.close()
            self._sockets.append(held)
            return
        held.close()
        log.warning("this system reserves no ports: another user may take %d in a restart", port)


def _highest() -> int:
    try:
        return max(int(RANGE_FILE.read_text().split()[0]), MIN_PORT + 4096)
    except (OSError, ValueError, IndexError):
        return 32768
