"""The metrics port: it answers, and no client can occupy it."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from kvrelay.errors import Rejected
from kvrelay.rpc.server import exposition

SECONDS = 30.0


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("kvrelay_test", "A number.", registry=registry).set(7)
    Gauge("kvrelay:with_colon", "A number.", registry=registry).set(8)
    server = exposition.serve(registry, "127.0.0.1", 0)
    yield server.server_port
    server.shutdown()
    server.server_close()


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        return bytes(answer.read())


def test_it_answers(port: int) -> None:
    assert b"kvrelay_test 7.0" in scrape(port)


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # 2.42
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.2",  # 3
)


@pytest.mark.parametrize("accepted", PROMETHEUS)
def test_prometheus_sees_the_names_of_the_pages(port: int, accepted: str) -> None:
    url = f"http://127.0.0.1:{port}/metrics"
    asked = urllib.request.Request(url, headers={"Accept": accepted})
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"\nkvrelay:with_colon 8.0\n" in answer.read()


def test_prometheus_client_still_spoils_colons() -> None:
    """Fails once it writes them in OpenMetrics too: then that format can be offered."""
    registry = CollectorRegistry()
    Gauge("kvrelay:with_colon", "A number.", registry=registry).set(8)
    page: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    assert b"\nkvrelay_with_colon 8.0\n" in page


def test_who_says_nothing_is_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", port), SECONDS) as silent:
        silent.sendall(b"GET /metr")
        assert silent.recv(1) == b""


def test_who_says_a_byte_now_and_then_is_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "CONNECTION_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", port), SECONDS) as slow:
        slow.settimeout(0.05)
        assert any(_closed(slow) for _ in range(int(SECONDS / 0.05)))


def _closed(sock: socket.socket) -> bool:
    """Whether the other side has closed, found by sending one byte more."""
    try:
        sock.sendall(b"G")
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_are_counted(port: int) -> None:
    address = ("127.0.0.1", port)
    held = [socket.create_connection(address, SECONDS) for _ in range(exposition.MAX_CONNECTIONS)]
    with socket.create_connection(address, SECONDS) as one_more:
        assert one_more.recv(1) == b""
    for sock in held:
        sock.close()


def test_nonsense_is_no_error_of_ours(port: int, caplog: pytest.LogCaptureFixture) -> None:
    for raw in (b"\xff" * 100, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200, b"\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
            sock.sendall(raw)
    assert b"kvrelay_test" in scrape(port)
    assert not caplog.records


def test_it_is_for_this_machine() -> None:
    with pytest.raises(Rejected, match="metrics_host"):
        exposition.serve(CollectorRegistry(), "0.0.0.0", 0)
