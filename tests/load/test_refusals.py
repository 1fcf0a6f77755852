"""What cannot work is said in one line that names the cause and the way out."""

from __future__ import annotations

import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from benchmarks.stub_server import stub
from kvrelay.cli.authority import CertificateAuthority
from kvrelay.load.figures import LevelFigures, Objectives
from kvrelay.load.request import LoadAnswer, LoadRequest
from tests.load.rig import LoadCommand, refusing_server
from tests.secured import write_files

SMALL = ("--prompt", 8, "--output", 4, "--requests", 2)


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_key_says_so(
    load: LoadCommand, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRELAY_API_KEY", raising=False)
    with refusing_server(status, "no such key") as url:
        found = load(url, *SMALL)
    assert found.status == 2
    assert found.err == (
        f"kvrelay load: api_key: the server refuses /v1/models (HTTP {status}: no such key):"
        " set KVRELAY_API_KEY to a key that it accepts\n"
    )


def test_a_reference_that_wants_a_key_cannot_be_used(load: LoadCommand) -> None:
    with stub() as server, refusing_server(401, "no such key") as url:
        found = load(server.url, *SMALL, "--check", url)
    assert (found.status, server.requests) == (2, 0)
    assert found.err == (
        "kvrelay load: check: the server refuses /v1/models (HTTP 401: no such key):"
        " --check sends no key, so name a server that wants none\n"
    )


def test_a_reference_that_is_no_folder_is_named(load: LoadCommand, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    with stub() as server:
        found = load(server.url, *SMALL, "--check", f"transformers:{folder}")
    assert (found.status, server.requests) == (2, 0)
    assert found.err == (
        f"kvrelay load: check: {folder}: no such folder: a model is a local folder with"
        " config.json and *.safetensors\n"
    )


def test_a_grpc_port_is_no_url(load: LoadCommand) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        found = load(f"http://127.0.0.1:{port}", *SMALL)
        server.stop(None).wait()
    assert found.status == 1
    assert found.err == (
        f"kvrelay load: 127.0.0.1:{port} does not speak HTTP/1.1: if it is the gRPC port of a"
        f" router, use its HTTP port, or kvrelay load --router 127.0.0.1:{port}\n"
    )


def test_a_certificate_of_an_unknown_authority_is_named(load: LoadCommand, tmp_path: Path) -> None:
    files = write_files(tmp_path, "router", CertificateAuthority())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]

        def shake_hands() -> None:
            with suppress(OSError):  # the listening socket is shut down
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        context.wrap_socket(connection, server_side=True)

        pool.submit(shake_hands)
        found = load(f"https://localhost:{port}", *SMALL)
        server.shutdown(socket.SHUT_RDWR)
    assert found.status == 1
    refused = f"kvrelay load: localhost:{port}: its certificate is refused ("
    assert re.fullmatch(
        rf"{re.escape(refused)}[a-z -]+\): name its authority with --tls-ca\n", found.err
    )


@pytest.mark.parametrize("flag", ["json", "csv", "html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_load(
    load: LoadCommand, flag: str, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "report"
    with stub() as server:
        found = load(server.url, *SMALL, f"--{flag}", path)
    assert (found.status, server.requests) == (2, 0)
    assert found.err == f"kvrelay load: {flag}: cannot write {path}: No such file or directory\n"


@pytest.mark.parametrize("flag", ["trace", "tenants"])
def test_a_file_that_is_not_there_is_refused_before_the_load(
    load: LoadCommand, flag: str, tmp_path: Path
) -> None:
    path = tmp_path / "none"
    found = load("http://127.0.0.1:9", f"--{flag}", path)
    assert found.status == 2
    assert found.err == f"kvrelay load: {flag}: cannot read {path}: No such file or directory\n"


def test_errors_that_differ_in_times_are_one_with_the_text_of_the_first() -> None:
    figures = LevelFigures("1 at once", Objectives(), 0.0, False)
    request = LoadRequest(number=0, parts=((1, 2),), max_tokens=2, seed=0)
    for text in ("ask again in 3 s", "ask again in 4 s", "HTTP 500"):
        figures.add(LoadAnswer(request, 0.0, 0.0, ended="refused", error=text))
    assert figures.errors == {"ask again in 3 s": 2, "HTTP 500": 1}


def test_the_report_shows_one_of_several_times(load: LoadCommand) -> None:
    with refusing_server(429, "ask again in 3 s", "ask again in 4 s") as url:
        found = load(url, *SMALL, "--model", "m", "--concurrency", 1)
    assert found.levels[0]["errors"] == {"HTTP 429: ask again in 3 s": 2}
    assert "2 x, such as: HTTP 429: ask again in 3 s\n" in found.out
