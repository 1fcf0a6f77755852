"""A DNS server of one name whose address changes, as a replaced container's does."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

HEADER = struct.Struct("!6H")  # id, flags, questions, answers, authorities, additional
ANSWERED, A, IN = 0x8180, 1, 1


class Names(asyncio.DatagramProtocol):
    """Answers every query for an A record with ``host``, others with nothing; RFC 1035."""

    def __init__(self, host: str) -> None:
        self.host = host

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        number, *_ = HEADER.unpack_from(data)
        end = data.index(b"\0", HEADER.size) + 5
        kind, _ = struct.unpack_from("!HH", data, end - 4)
        record = b""
        if kind == A:  # its name is the question's, at byte 12; nobody may keep it
            packed = ipaddress.IPv4Address(self.host).packed
            record = struct.pack("!HHHIH", 0xC000 | HEADER.size, A, IN, 0, len(packed)) + packed
        header = HEADER.pack(number, ANSWERED, 1, int(kind == A), 0, 0)
        self._transport.sendto(header + data[HEADER.size : end] + record, addr)


@asynccontextmanager
async def names(host: str) -> AsyncIterator[tuple[Names, str]]:
    """Run such a server; yields it and its address for a target ``dns://ADDRESS/NAME:PORT``."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        lambda: Names(host), local_addr=("127.0.0.1", 0)
    )
    try:
        yield protocol, f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()
