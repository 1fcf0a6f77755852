"""Who is at the other end of a Unix socket, and a name for one that only its users can know."""

from __future__ import annotations

import os
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("iII")


def abstract_name(boot: bytes) -> str:
    """Name in the abstract namespace, without its leading zero: no file, gone with its process."""
    return f"kvrelay-store-{boot.hex()}"


def address_of(name: str) -> str:
    """As ``bind`` and ``connect`` take it."""
    return "\0" + name


def is_trusted(sock: socket.socket) -> bool:
    """Whether the peer runs as our own user or as root, by what the system says of it."""
    if sys.platform != "linux":
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return uid in (0, os.getuid())
