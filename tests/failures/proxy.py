"""A TCP proxy that injects network faults on command, repeatably.

    with Proxy("127.0.0.1:50051", seed=1) as proxy:
        connect(proxy.address)
        proxy.down.faults = Faults(delay=0.1, jitter=0.05)   # from the target to the client
        proxy.up.hold()                                      # nothing goes to the target ...
        proxy.up.release()                                   # ... until now, and nothing was lost

Faults may change at any moment and act on the next chunk. Bytes are counted per connection.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

CHUNK = 1 << 16
START_SECONDS = 10.0
SLICE_SECONDS = 0.02  # of a limited bandwidth: chunks of so many seconds


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens to one direction. Times in seconds, ``rate`` in bytes a second."""

    delay: float = 0.0
    jitter: float = 0.0  # up to so much more, for each chunk
    rate: float | None = None
    cut_after: int | None = None  # then the connection is reset
    half_close_after: int | None = None  # then this direction ends, the other goes on
    flip_every: int | None = None  # on average one bit in so many bytes
    black_hole: bool = False  # swallow; a connection that lost bytes never delivers again


class Way:
    """One direction of every connection."""

    def __init__(self, seed: int) -> None:
        self.faults = Faults()
        self.passed = 0  # bytes, over all connections
        self.lost = 0  # bytes that a black hole swallowed
        self._chance = random.Random(seed)
        self._open = asyncio.Event()
        self._open.set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def hold(self) -> None:
        """Keep back what comes, until ``release``."""
        self._tell(self._open.clear)

    def release(self) -> None:
        """Let go what was kept back."""
        self._tell(self._open.set)

    def _tell(self, what: object) -> None:
        if self.loop is not None and callable(what):
            self.loop.call_soon_threadsafe(what)

    async def wait(self, count: int) -> None:
        """As long as so many bytes take."""
        await self._open.wait()
        faults = self.faults
        seconds = faults.delay + self._chance.random() * faults.jitter
        if faults.rate is not None:
            seconds += count / faults.rate
        if seconds:
            await asyncio.sleep(seconds)
            await self._open.wait()

    def spoil(self, chunk: bytes) -> bytes:
        """The chunk with its flipped bits."""
        every = self.faults.flip_every
        if every is None:
            return chunk
        spoilt = bytearray(chunk)
        for index in range(len(spoilt)):
            if self._chance.randrange(every) == 0:
                spoilt[index] ^= 1 << self._chance.randrange(8)
        return bytes(spoilt)

    def most(self) -> int:
        """Bytes of the next chunk."""
        rate = self.faults.rate
        return CHUNK if rate is None else max(1, min(CHUNK, int(rate * SLICE_SECONDS)))


class Cut(Exception):
    """The connection is to be reset."""


class Proxy:
    """Listens on a port of its own; a context manager. ``up`` goes to the target.

    With ``tls`` its clients come by TLS, and what they say goes on in plain text.
    """

    def __init__(self, target: str, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._tls = tls
        self._target = host, int(port)
        self.up = Way(seed)
        self.down = Way(seed + 1)
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()

    def __enter__(self) -> Proxy:
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise TimeoutError(f"the proxy of {self._target} did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._reset_all)

    def heal(self) -> None:
        """No faults any more; connections that lost bytes are reset."""
        dirty = self.up.faults.black_hole or self.down.faults.black_hole
        self.up.faults = self.down.faults = Faults()
        self.up.release()
        self.down.release()
        if dirty:
            self.cut()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self.up.loop = self.down.loop = self._loop
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        )
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        self._reset_all()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _reset_all(self) -> None:
        for writer in self._writers:
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                _pump(reader, far_writer, self.up), _pump(far_reader, writer, self.down)
            )
            for one in pair:
                one.close()
        except (Cut, OSError):
            for one in pair:
                _reset(one)
        finally:
            self._writers -= pair


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a dead peer's kernel does, without a FIN."""
    linger = struct.pack("ii", 1, 0)
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
    passed, swallowed = 0, False
    while chunk := await reader.read(way.most()):
        await way.wait(len(chunk))
        faults = way.faults
        swallowed = swallowed or faults.black_hole
        if swallowed:
            way.lost += len(chunk)
            continue
        ends = [n for n in (faults.cut_after, faults.half_close_after) if n is not None]
        chunk = way.spoil(chunk[: max(0, min(ends) - passed)] if ends else chunk)
        passed += len(chunk)
        way.passed += len(chunk)
        writer.write(chunk)
        await writer.drain()
        if faults.cut_after is not None and passed >= faults.cut_after:
            raise Cut
        if faults.half_close_after is not None and passed >= faults.half_close_after:
            break
    with suppress(OSError):
        writer.write_eof() if writer.can_write_eof() else writer.close()
