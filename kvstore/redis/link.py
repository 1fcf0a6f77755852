"""One connection to a Redis server as a pipe for commands and their answers."""

from __future__ import annotations

import ssl

from common.errors import Unavailable
from kvstore.redis.dialling import connection
from kvstore.redis.replies import Replies
from kvstore.redis.settings import Settings
from kvstore.redis.tlspipe import TlsPipe
from kvstore.wire.pipe import Pipe
from rpc.address import Address
from rpc.deadline import Deadline


class Link:
    """``used``: it has answered before, so that its end may be an old one."""

    def __init__(self, address: Address, settings: Settings, deadline: Deadline) -> None:
        self._connection = connection(address, settings, deadline)
        sock = self._connection._sock
        if sock is None:
            raise Unavailable(f"{address} hung up")
        self.pipe: Pipe = TlsPipe(sock) if isinstance(sock, ssl.SSLSocket) else Pipe(sock)
        self.replies = Replies(self.pipe)
        self.used = False

    def ask(self, commands: bytes) -> None:
        """Send commands."""
        self.pipe.send([commands])
