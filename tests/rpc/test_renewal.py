"""Certificates and tokens that change while a server and its clients run."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.rpc.channel import ChannelOptions, open_channel, open_sync_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.security import policy, renewal
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.identity import Tenant, caller
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.renewal import Renewal
from kvrelay.rpc.security.tls import server_context
from kvrelay.rpc.server import families
from kvrelay.rpc.server.server import Server, ServerOptions
from kvrelay.v1 import router_pb2, router_pb2_grpc
from tests.secured import (
    ALICE,
    CREDENTIALS,
    FLEET,
    SERVICE,
    Files,
    write_credentials,
    write_files,
)

NEW_ALICE = "new-secret-of-alice-in-the-test"
SECONDS = 20.0
DAY = 86_400.0
Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)


class Echo(router_pb2_grpc.RouterServiceServicer):
    """Counts for as long as the client reads."""

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        for number in range(1000):
            yield router_pb2.GenerateResponse(text=f"{number} {caller().tenant.name}")
            await asyncio.sleep(0.01)

    async def Announce(self, request: object, context: object) -> router_pb2.AnnounceResponse:
        return router_pb2.AnnounceResponse()

    async def ListWorkers(self, request: object, context: object) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse()


class Process:
    """What a process has installed, and its files; ``look`` twice is what a second does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = CertificateAuthority()
        self.files = write_files(folder, "own", self.authority)
        self.options = self.files.options(write_credentials(folder))
        policy.install(self.options)
        self.renewal = Renewal(self.options)

    def issue(self, days: float, authority: CertificateAuthority | None = None) -> Files:
        """Replace certificate, key and authority."""
        return write_files(self.folder, "own", authority or self.authority, days)

    def look(self) -> None:
        self.renewal.look()
        self.renewal.look()

    def client(self, token: str) -> policy.Security:
        """A caller with a copy of the certificates of now."""
        return policy.load(
            SecurityOptions(
                tls_cert=self.files.cert, tls_key=self.files.key, tls_ca=self.files.ca, token=token
            )
        )


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    before = policy.installed()
    made = Process(tmp_path)
    renewal._running.add(made.renewal)
    yield made
    renewal._running.discard(made.renewal)
    policy._installed = before


@contextmanager
def _presented(address: str, files: Files) -> Iterator[ssl.SSLSocket]:
    """A TLS connection to a server, by the certificates in these files."""
    host, port = address.rsplit(":", 1)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as shaken,
    ):
        yield shaken


def days_left(address: str, files: Files) -> int:
    """Of the certificate that a server shows."""
    with _presented(address, files) as shaken:
        shown = shaken.getpeercert()
    assert shown is not None
    return round((ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()) / DAY)


async def started() -> tuple[Server, str]:
    server = Server(ServerOptions())
    server.add(
        "kvrelay.v1.RouterService",
        lambda made: router_pb2_grpc.add_RouterServiceServicer_to_server(Echo(), made),
    )
    return server, await server.start()


def generate(channel: grpc.aio.Channel) -> Call:
    stub = router_pb2_grpc.RouterServiceStub(channel)
    return stub.Generate(router_pb2.GenerateRequest(), timeout=SECONDS)


async def text_of(call: Call) -> str:
    """The text of the next response."""
    response = await call.read()
    assert isinstance(response, router_pb2.GenerateResponse)
    return response.text


async def code_of(address: str, security: policy.Security) -> grpc.StatusCode | None:
    """The status of a call; ``None`` if it is answered."""
    async with open_channel(address, ChannelOptions(security=security)) as channel:
        try:
            call = generate(channel)
            await text_of(call)
            call.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code()
    return None


async def test_a_server_shows_the_new_certificate_and_keeps_its_streams(process: Process) -> None:
    server, address = await started()
    try:
        client = process.client(ALICE)
        async with open_channel(address, ChannelOptions(security=client)) as channel:
            call = generate(channel)
            await call.read()
            assert await asyncio.to_thread(days_left, address, process.files) == 1
            process.issue(30)
            process.look()
            assert await asyncio.to_thread(days_left, address, process.files) == 30
            texts = [await text_of(call) for _ in range(20)]
            assert texts == [f"{number} alice" for number in range(1, 21)]
            call.cancel()
    finally:
        await server.stop()


async def test_a_new_token_is_accepted_and_the_old_one_refused(process: Process) -> None:
    server, address = await started()
    old, new = process.client(ALICE), process.client(NEW_ALICE)
    try:
        assert await code_of(address, old) is None
        assert await code_of(address, new) is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(address, ChannelOptions(security=old)) as channel:
            call = generate(channel)
            await call.read()
            write_credentials(process.folder, CREDENTIALS.replace(ALICE, NEW_ALICE))
            process.look()
            assert await code_of(address, new) is None
            assert await code_of(address, old) is grpc.StatusCode.UNAUTHENTICATED
            await call.read()  # a stream that was open goes on
            call.cancel()
    finally:
        await server.stop()


async def test_a_new_authority_is_the_only_one_that_is_trusted(process: Process) -> None:
    server, address = await started()
    before = process.client(ALICE)
    try:
        process.issue(30, CertificateAuthority())
        process.look()
        assert await code_of(address, process.client(ALICE)) is None
        assert await code_of(address, before) is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop()


def spoil(process: Process, broken: str) -> Callable[[], object]:
    """Write a file that cannot be used; returns what writes it back."""
    cert, key = Path(process.files.cert), Path(process.files.key)
    kept = cert.read_bytes(), key.read_bytes()
    match broken:
        case "half a certificate":
            cert.write_bytes(kept[0][: len(kept[0]) // 2])
        case "another key":
            key.write_bytes(process.authority.issue("other", ("localhost",), 1).key)
        case "no token":
            write_credentials(process.folder, "")
        case "another fleet":
            write_credentials(process.folder, CREDENTIALS.replace(FLEET, "another-fleet-secret"))
    return lambda: (cert.write_bytes(kept[0]), key.write_bytes(kept[1]))


@pytest.mark.parametrize(
    "broken", ["half a certificate", "another key", "no token", "another fleet"]
)
async def test_what_cannot_be_used_changes_nothing(
    process: Process, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, address = await started()
    failed = renewal.results()["failed"]
    try:
        write_back = spoil(process, broken)
        process.look()
        process.look()
        assert renewal.results()["failed"] == failed + 1  # once, not at each look
        (line,) = [each for each in caplog.messages if "stay as they were" in each]
        assert SERVICE not in line
        write_back()
        assert await code_of(address, process.client(ALICE)) is None
        stranger = process.client("a-secret-that-nobody-knows")
        assert await code_of(address, stranger) is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await server.stop()


def test_a_broken_file_is_replaced_by_a_good_one(process: Process) -> None:
    cert = Path(process.files.cert)
    cert.write_text("nonsense")
    process.look()
    process.issue(7)
    process.look()
    tls = policy.installed().tls
    assert tls is not None
    assert tls.expires is not None
    assert round((tls.expires - time.time()) / DAY) == 7


def test_files_that_are_being_written_are_not_read_yet(process: Process) -> None:
    reads = renewal.results()
    cert = Path(process.files.cert)
    for length in (10, 100, 500):
        cert.write_bytes(b"x" * length)
        process.renewal.look()
    assert renewal.results() == reads
    process.renewal.look()
    assert renewal.results()["failed"] == reads["failed"] + 1


def test_a_mounted_secret_is_exchanged_by_its_link(process: Process, tmp_path: Path) -> None:
    """As Kubernetes does: the file's name stays, the folder behind a link is another."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, token in zip(folders, (ALICE, NEW_ALICE), strict=True):
        folder.mkdir()
        write_credentials(folder, CREDENTIALS.replace(ALICE, token))
    link = tmp_path / "data"
    link.symlink_to(folders[0])
    options = SecurityOptions(credentials=str(link / "credentials.toml"))
    policy.install(options)
    mounted = Renewal(options)
    other = tmp_path / "data.new"
    other.symlink_to(folders[1])
    os.replace(other, link)
    mounted.look()
    mounted.look()
    known = policy.installed().credentials
    assert known.identify(NEW_ALICE) is not None
    assert known.identify(ALICE) is None


async def test_the_calls_of_a_service_use_the_new_certificates_and_token(process: Process) -> None:
    """A channel that was open before, against a server that knows the new ones only."""
    server, address = await started()
    channel, sync = open_channel(address), open_sync_channel(address)
    sync_stub = router_pb2_grpc.RouterServiceStub(sync)
    try:
        running = generate(channel)
        await text_of(running)
        new_service = "new-secret-of-the-services-in-the-test"
        process.issue(30, CertificateAuthority())
        write_credentials(process.folder, CREDENTIALS.replace(SERVICE, new_service))
        process.look()
        again = generate(channel)
        assert await text_of(again) == "0 "
        assert await is_serving(channel, Deadline.after(SECONDS))

        def sync_text() -> str:
            call = sync_stub.Generate(router_pb2.GenerateRequest(), timeout=SECONDS)
            text: str = next(iter(call)).text
            call.cancel()
            return text

        assert await asyncio.to_thread(sync_text) == "0 "
        assert await text_of(running) == "1 "  # on the connection of before
        for call in (running, again):
            call.cancel()
    finally:
        sync.close()
        await channel.close()
        await server.stop()


def test_a_server_of_the_standard_library_follows(process: Process) -> None:
    context = server_context(lambda: policy.installed().used_tls)
    before = process.folder / "before"
    shutil.copytree(process.folder, before)

    def handshake(folder: Path) -> int:
        """Days left of what the server shows, to a client with the files of this folder."""
        client = ssl.create_default_context(cafile=str(folder / "own.ca"))
        client.load_cert_chain(folder / "own.cert", folder / "own.key")
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(down, up, server_hostname="localhost"),
            context.wrap_bio(up, down, server_side=True),
        )
        for end in ends * 3:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        shown = ends[0].getpeercert()
        assert shown is not None
        return round((ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()) / DAY)

    assert handshake(process.folder) == 1
    process.issue(30, CertificateAuthority())
    process.look()
    assert handshake(process.folder) == 30
    with pytest.raises(ssl.SSLError):
        handshake(before)


def test_a_store_takes_no_new_share_of_its_memory(process: Process) -> None:
    def fixed(known: Credentials) -> frozenset[Tenant]:
        return frozenset(tenant for tenant in known.tenants if tenant.store_bytes is not None)

    store = Renewal(process.options, fixed)
    write_credentials(process.folder, CREDENTIALS + 'store-bytes = "1MiB"\n')
    for _ in range(2):
        store.look()
    assert policy.installed().credentials.tenants[1].store_bytes is None


def test_the_pages_show_the_end_of_the_certificate_and_the_reloads(process: Process) -> None:
    before = renewal.results()
    process.issue(30)
    process.look()
    samples = {
        (sample.name, sample.labels.get("result")): sample.value
        for metric in families.security()
        for sample in metric.samples
    }
    end = samples["kvrelay:certificate_expiry_timestamp_seconds", None]
    assert round((end - time.time()) / DAY) == 30
    assert samples["kvrelay:credential_reloads_total", "ok"] == before["ok"] + 1
    assert samples["kvrelay:credential_reloads_total", "failed"] == before["failed"]
