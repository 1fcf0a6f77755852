"""Addresses to listen on: ``HOST:PORT`` (port 0: any free one) or ``unix:PATH``."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from kvrelay.errors import Rejected

ROUTER_PORT = 50051
"""The default port of a router, for the router and its clients."""

HTTP_PORT = 8000
"""The default port of the HTTP API of a cluster, as vLLM has it."""


def _loopback() -> str:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
        except OSError:  # not an address of this host
            continue
        return host
    return "127.0.0.1"


LOOPBACK = _loopback()
"""Where this host reaches itself: ``127.0.0.1``, or ``::1`` on a host with IPv6 only."""


@dataclass(frozen=True, slots=True)
class Address:
    """``port`` is ``None`` for a Unix socket, whose path is then in ``host``."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ``Rejected`` for the field ``address``."""
        if not text.isprintable():  # unfit for a resolver and for a log
            raise Rejected("address", f"{text!r} is neither HOST:PORT nor unix:PATH")
        if text.startswith("unix:"):
            if len(text) == len("unix:"):
                raise Rejected("address", f"{text!r} has no path: give unix:/path/to/socket")
            return cls(text.removeprefix("unix:"), None)
        host, colon, port = text.rpartition(":")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise Rejected("address", f"{text!r} is neither HOST:PORT nor unix:PATH")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def with_port(self, port: int) -> Address:
        """The same host with the port that was bound."""
        return self if self.port is None else Address(self.host, port)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.port is None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.port is None:
            return f"unix:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_ROUTER = str(Address(LOOPBACK, ROUTER_PORT))
