"""The ports of a cluster, and how many messages each of them got and how they ended."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvstore.wire.sockets import unix_address
from tests.fuzz.calls import Method, methods
from tests.fuzz.mutate import Mutator

CALL_SECONDS = 0.5
READ_SECONDS = 0.02
CONNECT_SECONDS = 10.0
CONNECTIONS = 100  # that a port is held with at once
BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
AT_ONCE = 24  # messages of one port


class Port(Protocol):
    """Something that takes messages. ``ended`` counts how it answered.

    ``turns``: as how many of these one port is listed, which share its messages.
    """

    name: str
    turns: int
    ended: Counter[str]

    async def send(self) -> None:
        """One message."""


@dataclass(slots=True)
class Calls:
    """The methods of a gRPC port."""

    name: str
    channels: dict[str, grpc.aio.Channel]
    methods: Sequence[Method]
    chance: random.Random
    turns: int = 2
    ended: Counter[str] = field(default_factory=Counter)

    async def send(self) -> None:
        method = self.chance.choice(self.methods)
        mutator = Mutator(self.chance)
        count = self.chance.choice((1, 2, 4)) if method.requests else 1
        raws = [mutator.of(method.seed) for _ in range(count)]
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        call = self.channels[method.token].stream_stream(method.path)
        try:
            async for _ in call(aiter_of(raws), timeout=CALL_SECONDS):
                pass
        except grpc.aio.AioRpcError as error:
            code = error.code()
            self.ended[code.name] += 1
            # "from Core" is our own side's: it was refused while it still sent.
            if code in BUGS and "from Core" not in (error.details() or ""):
                self.ended[f"{code.name} of {method.path}: {error.details()}"] += 1
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.ended["CANCELLED"] += 1  # by gRPC: the call ended while it still sent
        else:
            self.ended["OK"] += 1


async def aiter_of(raws: Sequence[bytes]) -> AsyncGenerator[bytes]:
    for raw in raws:
        yield raw


@asynccontextmanager
async def calls(
    name: str, role: str, address: str, seed: int, options: Callable[[str], ChannelOptions]
) -> AsyncIterator[Calls]:
    """A connection for each token."""
    found = list(methods(role))
    tokens = sorted({method.token for method in found})
    channels = {token: open_channel(address, options(token)) for token in tokens}
    try:
        yield Calls(name, channels, found, random.Random(seed))
    finally:
        for channel in channels.values():
            await channel.close()


@dataclass(slots=True)
class Bytes:
    """A port that is written bytes; ``address`` is HOST:PORT, or ``@NAME`` of a Unix socket.

    With ``tls`` every other message comes after a handshake, the rest in the place of one.
    """

    name: str
    address: str
    make: Callable[[], bytes]
    turns: int = 1
    tls: ssl.SSLContext | None = None
    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    async def send(self) -> None:
        self.sent += 1
        try:
            reader, writer = await connect(self.address, self.tls if self.sent % 2 else None)
        except (OSError, TimeoutError):
            self.ended["refused"] += 1
            return
        try:
            writer.write(self.make())
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), CALL_SECONDS)
            self.ended[await _answer(reader)] += 1
        except OSError:
            self.ended["cut"] += 1
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader) -> str:
    try:
        got = await asyncio.wait_for(reader.read(1 << 16), READ_SECONDS)
    except TimeoutError:
        return "silent"
    return "answered" if got else "closed"


async def connect(
    address: str, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("@"):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        made.connect(unix_address(address[1:]))
        opening = asyncio.open_connection(sock=made)
    else:
        host, port = address.rsplit(":", 1)
        opening = asyncio.open_connection(host, int(port), ssl=tls)
    return await asyncio.wait_for(opening, CONNECT_SECONDS)


async def besiege(address: str, seconds: float) -> None:
    """Many connections that say nothing, or a byte now and then."""
    opened = [await connect(address) for _ in range(CONNECTIONS)]
    try:
        for number in range(5):
            for _, writer in opened[::2]:
                with suppress(OSError):
                    writer.write(b"PRI * HTTP/2.0"[number : number + 1])
            await asyncio.sleep(seconds / 5)
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def flood(port: Port, messages: int) -> None:
    """So many messages, some at once."""
    left = iter(range(messages))

    async def sending() -> None:
        for _ in left:
            await port.send()

    await asyncio.gather(*(sending() for _ in range(AT_ONCE)))
