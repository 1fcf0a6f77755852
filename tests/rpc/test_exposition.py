"""The metrics port: it answers, and no client can occupy it."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.errors import Rejected
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.identity import Caller, CallerKind
from kvrelay.rpc.server import exposition
from kvrelay.rpc.server.authorization import ADMINS, CLIENTS, STORE_USERS, is_allowed
from tests.secured import (
    ADMIN,
    ALICE,
    CREDENTIALS,
    SERVICE,
    Files,
    write_credentials,
    write_files,
)

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


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path)
    answer = connection.getresponse()
    found = answer.status, answer.read(), {name.lower(): text for name, text in answer.getheaders()}
    connection.close()
    return found


def test_head_is_answered_as_get_is_without_the_body(port: int) -> None:
    for path in ("/metrics", "/"):
        _, page, asked = ask(port, path)
        status, body, headers = ask(port, path, "HEAD")
        assert (status, body) == (200, b"")
        assert headers["content-type"] == asked["content-type"]
        assert int(headers["content-length"]) == len(page) > 0


def test_other_paths_and_methods_are_no_metrics(port: int) -> None:
    assert b"/metrics" in ask(port, "/")[1]
    for path in ("/health", "/metrics/", "/favicon.ico", "/metrics2"):
        status, page, _ = ask(port, path)
        assert status == 404
        assert b"kvrelay_test" not in page
    status, page, headers = ask(port, "/metrics", "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert b"kvrelay_test" not in page


METRICS_TOKEN = "metrics-secret-of-the-test"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[int, Files]]:
    """The page as other machines reach it, of a process with TLS and credentials."""
    files = write_files(tmp_path, "own", CertificateAuthority())
    table = write_credentials(tmp_path, f'metrics = "{METRICS_TOKEN}"' + CREDENTIALS)
    before = policy.installed()
    policy.install(files.options(table))
    registry = CollectorRegistry()
    Gauge("kvrelay_test", "A number.", registry=registry).set(7)
    server = exposition.serve(registry, "0.0.0.0", 0)
    yield server.server_port, files
    server.shutdown()
    server.server_close()
    policy._installed = before


def scrape_remote(port: int, files: Files, token: str | None) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    connection = http.client.HTTPSConnection("localhost", port, timeout=SECONDS, context=context)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("GET", "/metrics", headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_other_machines_need_a_certificate_and_a_token(remote: tuple[int, Files]) -> None:
    port, files = remote
    for token in (METRICS_TOKEN, SERVICE, ADMIN):
        status, page = scrape_remote(port, files, token)
        assert status == 200
        assert b"kvrelay_test 7.0" in page
    assert scrape_remote(port, files, None)[0] == 401
    assert scrape_remote(port, files, "a-secret-that-nobody-knows")[0] == 401
    assert scrape_remote(port, files, ALICE)[0] == 403
    bare = ssl.create_default_context(cafile=files.ca)
    connection = http.client.HTTPSConnection("localhost", port, timeout=SECONDS, context=bare)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _asked(connection)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(port, "/metrics")


def _asked(connection: http.client.HTTPSConnection) -> bytes:
    with closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


def test_a_token_for_metrics_opens_nothing_else() -> None:
    methods = {*CLIENTS, *STORE_USERS, *ADMINS, "/kvrelay.v1.DecodeService/Decode"}
    assert not any(is_allowed(Caller(CallerKind.METRICS), method) for method in methods)


def test_a_silent_handshake_takes_no_place(
    remote: tuple[int, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, files = remote
    silent = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(4)]
    assert scrape_remote(port, files, METRICS_TOKEN)[0] == 200
    monkeypatch.setattr(exposition, "READ_SECONDS", 0.2)
    late = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(4)]
    assert [each.recv(1) for each in late] == [b""] * 4
    for each in (*silent, *late):
        each.close()


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
