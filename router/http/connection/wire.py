"""The transports of a connection: how much is read at once, and what its client takes."""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.flow_control import FlowControl

READ_BYTES = 16 << 10
"""Read from a socket at once: parsing as many, in chunks of one byte, takes 4 ms.

Over TLS about twice as many may be given to the parser together.
"""

_CLOSED = getattr(select, "POLLRDHUP", 0)
"""What ``poll`` tells of a client that has closed its end; elsewhere than on Linux only errors."""


WATCH_SECONDS = 1.0
"""How often it is checked, at least, whether a client reads, and whether it has left."""


class Wire:
    """An open connection. ``below`` is the transport that carries TLS, if there is TLS."""

    def __init__(self, transport: asyncio.Transport, below: asyncio.Transport | None) -> None:
        self._transport = transport
        self._lowest = below or transport  # on the socket
        if below is None:  # else TLS has said it
            transport.max_size = READ_BYTES  # type: ignore[attr-defined]

    def is_closing(self) -> bool:
        return self._lowest.is_closing()

    def is_closed_by_peer(self) -> bool:
        """Whether the client has closed its end, though nothing is read that would tell it."""
        one = self._lowest.get_extra_info("socket")
        if one is None:
            return False
        poll = select.poll()
        poll.register(one.fileno(), _CLOSED)
        return bool(poll.poll(0))

    def untaken(self) -> int:
        """Bytes that were written and are not known to have reached the client's system."""
        waiting = bytes(4)
        with suppress(OSError, AttributeError, ValueError):  # closed, or its system does not tell
            number = self._lowest.get_extra_info("socket").fileno()
            waiting = fcntl.ioctl(number, termios.TIOCOUTQ, waiting)
        return self.buffered() + int.from_bytes(waiting, sys.byteorder)

    def buffered(self) -> int:
        """Bytes that were written and that the system has not taken yet."""
        size = self._lowest.get_write_buffer_size()
        if self._lowest is not self._transport and not self._transport.is_closing():
            size += self._transport.get_write_buffer_size()
        return size


class WriteWatch:
    """Calls ``stuck`` once ``state`` is the same for ``seconds``; ``None`` of it ends the watch."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        state: Callable[[], object],
        stuck: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._state = state
        self._stuck = stuck
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Without effect while it watches."""
        if self._timer is None:
            self._look(self._state(), self._loop.time())

    def stop(self) -> None:
        """For good: it keeps nothing of its connection, which is freed at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._state = self._stuck = _nothing

    def _look(self, before: object, since: float) -> None:
        self._timer = None
        state, now = self._state(), self._loop.time()
        if state is None:
            return
        if state != before:
            since = now
        elif now - since >= self._seconds:
            self._stuck()
            return
        seconds = min(self._seconds / 4, WATCH_SECONDS)
        self._timer = self._loop.call_later(seconds, self._look, state, since)


def _nothing() -> None:
    return


class HeldFlow(FlowControl):
    """Reading stays paused while requests wait, also where uvicorn would resume it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._held = False

    def hold(self, held: bool) -> None:
        """Stop reading, or go on if it was stopped here."""
        ends = self._held and not held
        self._held = held
        if held:
            self.pause_reading()
        elif ends:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._held:
            super().resume_reading()
