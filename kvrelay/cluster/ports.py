"""Free TCP ports, and how to reserve them until a server binds them.

Free ports lie below the kernel's range for outgoing connections, which takes ports from ``bind(0)``
before their server binds them. A reserved port is bound but never listened on: a server can bind
it, ``free_ports`` passes over it. Reserving works on Linux only; elsewhere the short race remains.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Rejected, Unavailable
from kvrelay.rpc.address import LOOPBACK

MIN_PORT = 10240
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 1000


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Distinct ports that no process listens on and that are not reserved."""
    found: list[int] = []
    for _ in range(TRIES):
        if len(found) == count:
            return found
        port = random.randrange(MIN_PORT, _highest())
        if port not in found and (held := _bind(host, port, reuse=False)) is not None:
            held.close()
            found.append(port)
    raise Unavailable(f"no {count} free ports on {host} between {MIN_PORT} and {_highest()}")


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on the port now."""
    probe = _bind(host, port, reuse=True)
    if probe is not None:
        probe.close()
    return probe is not None


@dataclass(frozen=True, slots=True)
class WantedPort:
    """A port to reserve; ``field`` and ``instead`` are for the error if it is taken."""

    host: str
    port: int
    field: str = "port"
    instead: str = "use another port"


class ReservedPorts:
    """Ports reserved for servers that start, and restart after a crash, until ``close``."""

    def __init__(self, ports: Iterable[WantedPort]) -> None:
        """Raises ``Rejected`` naming the first port that another process listens on."""
        self._sockets: list[socket.socket] = []
        for wanted in ports:
            held = _bind(wanted.host, wanted.port, reuse=True)
            if held is None:
                self.close()
                taken = f"{wanted.port} on {wanted.host} is taken"
                raise Rejected(wanted.field, f"{taken}: stop that process, or {wanted.instead}")
            if sys.platform == "linux":
                self._sockets.append(held)
            else:
                held.close()

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def _bind(host: str, port: int, *, reuse: bool) -> socket.socket | None:
    """A bound socket, ``None`` if the port is taken; without ``reuse`` also if it is reserved."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        made.bind((host, port))
    except OSError:
        made.close()
        return None
    return made


def _highest() -> int:
    try:
        return max(int(RANGE_FILE.read_text().split()[0]), MIN_PORT + 4096)
    except (OSError, ValueError, IndexError):
        return 32768
