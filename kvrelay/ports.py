"""Free TCP ports, taken below the range from which the kernel serves outgoing connections.

A port from ``bind(0)`` may be given away to any client in the moment before its server binds it;
a port below that range may not.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from common.errors import Unavailable

LOWEST = 10240
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES = 1000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody listens on now."""
    found: list[int] = []
    for _ in range(TRIES):
        if len(found) == count:
            return found
        port = random.randrange(LOWEST, _highest())
        if port not in found and is_free(port, host):
            found.append(port)
    raise Unavailable(f"no {count} free ports on {host} between {LOWEST} and {_highest()}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _highest() -> int:
    try:
        return max(int(RANGE_FILE.read_text().split()[0]), LOWEST + 4096)
    except (OSError, ValueError, IndexError):
        return 32768
