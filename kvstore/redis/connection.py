"""One connection to a Redis server as a pipe for commands and their answers."""

from __future__ import annotations

import ssl

from kvrelay.errors import Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.deadline import Deadline
from kvstore.redis.dialling import connection
from kvstore.redis.replies import ReplyReader
from kvstore.redis.settings import RedisSettings
from kvstore.redis.tls_socket import TlsSocket
from kvstore.wire.sockets import DeadlineSocket


class RedisConnection:
    """``used``: it has answered before, so that its end may be an old one."""

    def __init__(self, address: Address, settings: RedisSettings, deadline: Deadline) -> None:
        self._connection = connection(address, settings, deadline)
        sock = self._connection._sock
        if sock is None:
            raise Unavailable(f"{address} hung up")
        self.pipe: DeadlineSocket = (
            TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else DeadlineSocket(sock)
        )
        self.replies = ReplyReader(self.pipe)
        self.used = False

    def ask(self, commands: bytes) -> None:
        """Send commands."""
        self.pipe.send([commands])
