"""The store's side of a lane: how much of an answer is sent ahead of its reader."""

from __future__ import annotations

import socket

import pytest

from kvstore.server import lanes


@pytest.mark.parametrize(("client", "short"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_only_a_line_within_one_host_is_kept_short(client: str, short: bool) -> None:
    """What another host needs in flight is for the system to find out."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 10.0, (client, 0)),
        listener.accept()[0] as accepted,
    ):
        before = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        lanes._keep_short(accepted)
        after = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert before > 2 * lanes.NEAR_BUFFER  # the system counts its own bytes too, as many again
    assert after == (2 * lanes.NEAR_BUFFER if short else before)
