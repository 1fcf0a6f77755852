"""The fault proxy does what it says, byte for byte."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cluster.processes import until
from tests.failures.proxy import Faults, Proxy

PATIENCE = 20.0
SENT = bytes(range(256)) * 40


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_echo_all, args=(listener,), daemon=True).start()
        with Proxy(f"127.0.0.1:{listener.getsockname()[1]}", seed=7) as made:
            yield made


def _echo_all(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            return


def dial(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def echo(proxy: Proxy, sent: bytes = SENT) -> bytes:
    """What comes back until the end, or the reset, of a connection."""
    back = bytearray()
    with dial(proxy) as connection:
        with suppress(OSError):  # a reset may come before all is said
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        try:
            while data := connection.recv(1 << 16):
                back += data
        except OSError:
            pass  # the reset; "not connected" if the sender was told of it already
    return bytes(back)


def test_nothing_is_changed_without_faults(proxy: Proxy) -> None:
    assert echo(proxy) == SENT
    assert proxy.up.passed == proxy.down.passed == len(SENT)


def test_delay_and_bandwidth_take_their_time(proxy: Proxy) -> None:
    proxy.down.faults = Faults(delay=0.1, jitter=0.05)
    begun = time.monotonic()
    assert echo(proxy, b"x") == b"x"
    assert time.monotonic() - begun >= 0.1
    proxy.down.faults = Faults(rate=len(SENT) / 0.3)
    begun = time.monotonic()
    assert echo(proxy) == SENT
    assert time.monotonic() - begun >= 0.25


@pytest.mark.parametrize("count", [0, 1, 999])
def test_a_cut_after_so_many_bytes(proxy: Proxy, count: int) -> None:
    proxy.down.faults = Faults(cut_after=count)
    assert SENT[:count].startswith(echo(proxy))  # a reset may overtake what was sent before it
    proxy.heal()
    assert echo(proxy) == SENT


def test_half_close(proxy: Proxy) -> None:
    proxy.up.faults = Faults(half_close_after=100)
    assert echo(proxy) == SENT[:100]


def test_flips_are_repeatable_and_change_single_bits(proxy: Proxy) -> None:
    proxy.down.faults = Faults(flip_every=500)
    back = echo(proxy)
    assert len(back) == len(SENT)
    changed = [a ^ b for a, b in zip(back, SENT, strict=True) if a != b]
    assert 5 < len(changed) < 60
    assert all(bits.bit_count() == 1 for bits in changed)


def test_a_black_hole_swallows_and_stays(proxy: Proxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.down.faults = Faults(black_hole=True)
        connection.sendall(b"b")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(PATIENCE)
        until(lambda: proxy.down.lost == 1, "swallowed")
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert echo(proxy) == SENT


def test_hold_keeps_back_and_loses_nothing(proxy: Proxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.up.hold()
        connection.settimeout(0.2)
        connection.sendall(b"bc")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(PATIENCE)
        proxy.up.release()
        assert connection.recv(1) + connection.recv(1) == b"bc"


def test_cut_resets_what_is_open(proxy: Proxy) -> None:
    with dial(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
