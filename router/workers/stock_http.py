"""As much of HTTP/1.1 as ``vllm serve`` needs: one request a connection, its body as lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.errors import Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.status import NothingListens
from router.workers.health import WorkerLost


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply whose body is read as it arrives. ``WorkerLost`` if it ends early."""

    status: int
    length: int | None  # None: the body comes in chunks
    reader: asyncio.StreamReader

    async def lines(self) -> AsyncGenerator[bytes]:
        rest = b""
        async for data in self._parts():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line
        yield rest

    async def _parts(self) -> AsyncGenerator[bytes]:
        try:
            if self.length is not None:
                yield await self.reader.readexactly(self.length)
                return
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            raise WorkerLost(f"the server ended its reply early: {error!r}") from error


@asynccontextmanager
async def exchange(address: str, path: str, body: object = None) -> AsyncGenerator[HttpReply]:
    """Send a request: ``POST`` with a body of JSON, ``GET`` without. Closes the connection."""
    to = Address.parse(address)
    try:
        reader, writer = await asyncio.open_connection(to.host, to.port, limit=1 << 20)
    except ConnectionRefusedError as error:
        raise NothingListens(f"{address}: {error}") from error
    except OSError as error:
        raise Unavailable(f"{address}: {error}") from error
    try:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: {to}\r\n"
        head += f"connection: close\r\ncontent-length: {len(content)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            raise WorkerLost(f"{address} did not reply: {error!r}") from error
        headers = dict(line.split(": ", 1) for line in lines[1:-2])
        length = headers.get("content-length")
        yield HttpReply(int(lines[0].split()[1]), None if length is None else int(length), reader)
    finally:
        writer.close()
