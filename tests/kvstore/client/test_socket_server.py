"""The store's side of a socket: who is let in, how much is sent ahead of a reader."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import pytest

from kvrelay.rpc.deadline import Deadline
from kvstore.client.transports.connection import dial_unix
from kvstore.limits import StoreLimits
from kvstore.server import listener
from kvstore.server.block_store import BlockStore
from kvstore.wire.frames import Op, RequestFrame


@pytest.mark.parametrize(("client", "short"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_a_connection_within_one_host_is_kept_short(client: str, short: bool) -> None:
    """What another host needs in flight is for the system to find out."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), 10.0, (client, 0)),
        server.accept()[0] as accepted,
    ):
        before = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        listener._keep_short(accepted)
        after = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert before > 2 * listener.NEAR_BUFFER  # the system counts its own bytes too, as many again
    assert after == (2 * listener.NEAR_BUFFER if short else before)


def test_strangers_keep_nobody_on_this_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    block_store = BlockStore(StoreLimits(1 << 20))
    made = listener.TransportListener(block_store, listener.ListenerOptions())
    made.start()
    address = ("127.0.0.1", made.transports.socket_port)
    with ExitStack() as held:
        held.callback(made.stop)
        for _ in range(2):
            held.enter_context(socket.create_connection(address, 30.0))
        while len(made._open[False]) < 2:
            time.sleep(0.01)
        third = held.enter_context(socket.create_connection(address, 30.0))
        assert third.recv(1) == b""
        connection = dial_unix(made.transports.unix_socket, Deadline.after(30.0), block_store.boot)
        held.callback(connection.sock.close)
        connection.sock.limit(30.0)
        connection.send(RequestFrame(Op.ATTACH))
        fd, size = connection.receive_descriptor()
        os.close(fd)
        assert size == block_store.arena.size
