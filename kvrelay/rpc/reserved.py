"""Ports that stay reserved for one cluster while none of its processes listens on them.

A reservation is a bound socket that does not listen and that allows ``SO_REUSEPORT`` only. Linux
then lets no socket bind the port, or listen on it, but those of the same user that allow
``SO_REUSEPORT`` too, and gives connections to listening sockets only. So a server of the cluster
can start again on its port, and no other user of the machine can take it meanwhile.

The supervisor reserves the ports, and names them to its children in ``VARIABLE``. Every child
reserves all of them too, so that they stay reserved if the supervisor is killed.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

from kvrelay.rpc.address import Address

VARIABLE = "KVRELAY_RESERVED_PORTS"
SUPPORTED = sys.platform == "linux"
ANSWER_SECONDS = 1.0


def reserve(host: str, port: int) -> socket.socket | None:
    """Reserve a port; ``None`` if it is reserved, or if a process listens on it.

    The socket listens for a moment. That fails if another socket listens on the port, and from then
    on the kernel no longer lets sockets with ``SO_REUSEADDR`` bind it too without a check.
    """
    made = bind(host, port, reuse_address=True)
    if made is None:
        return None
    try:
        made.listen(1)
        _share_with_same_user(made)
        made.shutdown(socket.SHUT_RDWR)
    except OSError:
        made.close()
        return None
    return made


def join(environ: Mapping[str, str]) -> list[socket.socket]:
    """Reserve the ports in ``VARIABLE``, as the supervisor did. Keep the sockets."""
    held = []
    for address in _reserved(environ):
        made = bind(address.host, address.port or 0, reuse_address=True, reuse_port=True)
        if made is not None:  # else only the supervisor reserves it
            _share_with_same_user(made)
            held.append(made)
    return held


def variable(addresses: Iterable[Address]) -> dict[str, str]:
    """The environment that names reserved ports to a child."""
    return {VARIABLE: ",".join(map(str, addresses))} if SUPPORTED else {}


def is_reserved(address: Address) -> bool:
    """Whether a server of this process must bind ``address`` with ``SO_REUSEPORT``.

    Raises ``OSError`` if a process listens there already: both would get connections.
    """
    if not address.port or all(one.port != address.port for one in _reserved(os.environ)):
        return False
    with suppress(ConnectionRefusedError):
        socket.create_connection((address.host, address.port), ANSWER_SECONDS).close()
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return True


def bind(
    host: str, port: int, *, reuse_address: bool, reuse_port: bool = False
) -> socket.socket | None:
    """A bound socket, ``None`` if the kernel refuses it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a kernel without IPv6
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        return None
    return made


def _share_with_same_user(made: socket.socket) -> None:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _reserved(environ: Mapping[str, str]) -> list[Address]:
    return [Address.parse(text) for text in environ.get(VARIABLE, "").split(",") if text]
