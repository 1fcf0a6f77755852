"""Connections over TLS, which count before their handshake has ended."""

from __future__ import annotations

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from contextlib import suppress
from typing import cast

from router.http.connection.protocol import BoundedProtocol
from router.http.connection.wire import READ_BYTES

log = logging.getLogger("kvrelay.router")
logging.getLogger("asyncio").addFilter(lambda record: record.msg != "SSL connection is closed")
# Said of each write to a client that has left, until that is seen.


class TlsConnection(SSLProtocol):
    """A connection over TLS that is counted, and closed if its handshake is late.

    A server of asyncio's shows a connection to its protocol only after the handshake, for which it
    allows a minute. It keeps a connection that fails, with buffers of 300 KiB, until a garbage
    collection.
    """

    shakes_hands = True
    writes = False
    max_size = READ_BYTES

    def __init__(self, protocol: BoundedProtocol, context: ssl.SSLContext) -> None:
        super().__init__(
            protocol.loop,
            protocol,
            context,
            None,  # type: ignore[arg-type]  # no future to set after the handshake
            server_side=True,
            ssl_handshake_timeout=protocol.table.limits.head_seconds,  # type: ignore[arg-type]
        )
        self._set_read_buffer_limits(READ_BYTES)  # type: ignore[attr-defined]
        self.host = ""
        self._speaks: BoundedProtocol | None = protocol
        self._table = protocol.table
        self._below: asyncio.Transport | None = None
        protocol.end_handshake = self.end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast("asyncio.Transport", transport)
        if self._speaks is not None:
            self._speaks.below = self._below
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if peer else ""
        self._table.enter(self)
        super().connection_made(transport)

    def _fatal_error(self, exc: BaseException, message: str = "") -> None:
        """Send the alert that tells the client why, which asyncio drops."""
        with suppress(Exception):  # nothing more can be sent
            self._process_outgoing()  # type: ignore[attr-defined]
        super()._fatal_error(exc, message)

    def _check_shutdown_timeout(self) -> None:
        """Once a client has all, it may take 30 s to close; before, the watch sees that it reads.

        asyncio cuts what it has not read 30 s after the last write.
        """
        if self._below is not None and self._below.get_write_buffer_size():
            self._app_protocol.watch.start()  # type: ignore[attr-defined]
            seconds = self._ssl_shutdown_timeout  # type: ignore[attr-defined]
            later = self._loop.call_later(seconds, self._check_shutdown_timeout)
            self._shutdown_timeout_handle = later
            return
        super()._check_shutdown_timeout()  # type: ignore[misc]

    def end(self) -> None:
        """The handshake has ended, or the connection: it is not counted here."""
        if self._speaks is not None:
            self._table.leave(self)
            self._speaks.end_handshake = None
            self._speaks = None

    def abort(self) -> None:
        if self._below is not None:
            self._below.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._speaks is not None:
            self._speaks.let_go()
            log.debug("no TLS with %s: %s", self.host, exc or "it has left")
        if exc is not None:
            exc.__traceback__ = None  # a frame of asyncio's has the error and this connection
        self.end()
        self._below = None
        super().connection_lost(exc)
