"""Authentication and authorization: certificates, tokens, and the methods of each caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from kvrelay.cli.authority import LOCAL_NAMES, CertificateAuthority
from kvrelay.errors import Exhausted, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.channel import ChannelOptions, open_channel, open_sync_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.security import credentials, policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST, SERVICE_FIRST, Credentials
from kvrelay.rpc.security.identity import LOCAL_CALLER, Caller, CallerKind, Tenant, caller
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.security.policy import INSECURE, Security
from kvrelay.rpc.security.tls import TlsCredentials
from kvrelay.rpc.server.authorization import (
    CLIENTS,
    HEALTH_PREFIX,
    MAX_WATCHING,
    OPEN,
    OpenCalls,
    is_allowed,
)
from kvrelay.rpc.server.server import CALL_SHARES, Server, ServerOptions
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc
from tests.secured import (
    ADMIN,
    ALICE,
    BOB,
    CREDENTIALS,
    SECRETS,
    SERVICE,
    Files,
    write_credentials,
    write_files,
)

SECONDS = 20.0
NEW = "new-secret-of-the-test"


class Router(router_pb2_grpc.RouterServiceServicer):
    """Answers with the caller."""

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield router_pb2.GenerateResponse(text=f"{caller().kind.value} {caller().tenant.name}")

    async def Announce(
        self,
        request: router_pb2.AnnounceRequest,
        context: object,
    ) -> router_pb2.AnnounceResponse:
        return router_pb2.AnnounceResponse()

    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: object
    ) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse()


async def stats(request: bytes, context: object) -> bytes:
    """A method of the store."""
    return b""


@asynccontextmanager
async def serving(protection: Security, calls: int = 4096) -> AsyncIterator[str]:
    server = Server(ServerOptions(security=protection, max_calls=calls))
    server.add("kvrelay.v1.RouterService", lambda s: _register_router(s))
    server.add("kvrelay.v1.StoreService", lambda s: _register_store(s))
    try:
        yield await server.start()
    finally:
        await server.stop()


def _register_router(server: grpc.aio.Server) -> None:
    router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)


def _register_store(server: grpc.aio.Server) -> None:
    table: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
    table = {name: grpc.unary_unary_rpc_method_handler(stats) for name in ("GetStats", "Clear")}
    made = grpc.method_handlers_generic_handler("kvrelay.v1.StoreService", table)
    server.add_generic_rpc_handlers((made,))


async def generate(address: str, protection: Security) -> str:
    async with open_channel(address, ChannelOptions(security=protection)) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            call = stub.Generate(router_pb2.GenerateRequest(), timeout=SECONDS)
            return "".join([answer.text async for answer in call])
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


@pytest.fixture
def party(tmp_path: Path, authority: CertificateAuthority) -> Callable[..., Files]:
    def make(
        name: str,
        by: CertificateAuthority = authority,
        days: float = 1,
        hosts: Sequence[str] = LOCAL_NAMES,
    ) -> Files:
        return write_files(tmp_path, name, by, days, hosts)

    return make


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_credentials(tmp_path)


def shown(token: str | None) -> Security:
    return Security(credentials=credentials.load(SecurityOptions(token=token)))


async def test_mutual_tls(party: Callable[..., Files]) -> None:
    server, client = (policy.load(party(name).options()) for name in ("server", "client"))
    async with serving(server) as address:
        assert await generate(address, client) == f"{CallerKind.ADMIN.value} "
        assert await asyncio.to_thread(_called, address, client) == {"GetStats", "Clear"}


@pytest.mark.parametrize("case", ["plain", "no certificate", "wrong authority", "expired"])
async def test_who_does_not_get_through_the_handshake(
    case: str, party: Callable[..., Files]
) -> None:
    ours = party("server")
    client = {
        "plain": lambda: INSECURE,
        "no certificate": lambda: policy.load(SecurityOptions(tls_ca=ours.ca)),
        "wrong authority": lambda: _of_another(party("stranger", CertificateAuthority()), ours.ca),
        "expired": lambda: _unchecked(party("expired", days=-1)),
    }[case]()
    async with serving(policy.load(ours.options())) as address:
        with pytest.raises(Unavailable, match="is it on both sides"):
            await generate(address, client)


def _unchecked(files: Files) -> Security:
    """A process that was started when its certificate was still valid."""
    ca, cert, key = (Path(name).read_bytes() for name in (files.ca, files.cert, files.key))
    return Security(TlsCredentials(ca, cert, key))


def _of_another(files: Files, trusted: str) -> Security:
    """Trusts the server, but has a certificate of an authority unknown to it."""
    return policy.load(replace(files, ca=trusted).options())


@pytest.mark.parametrize("case", ["expired", "another authority", "another name"])
async def test_a_server_that_a_client_does_not_trust(
    case: str, party: Callable[..., Files], authority: CertificateAuthority
) -> None:
    client = policy.load(replace(party("client").options(), tls_mutual=False))
    by = CertificateAuthority() if case == "another authority" else authority
    hosts = ("example.org",) if case == "another name" else LOCAL_NAMES
    files = party("server", by, -1 if case == "expired" else 1, hosts)
    unchecked = _unchecked(files).tls
    assert unchecked is not None
    server = Security(replace(unchecked, mutual=False))
    async with serving(server) as address:
        with pytest.raises(Unavailable, match="for that name there"):
            await generate(address, client)
        if case == "another name":
            named = policy.load(replace(party("client").options(), tls_name="example.org"))
            assert await generate(address, named) == "admin "


async def test_without_mutual_tls_a_client_needs_no_certificate(
    party: Callable[..., Files],
) -> None:
    files = party("server")
    async with serving(policy.load(replace(files.options(), tls_mutual=False))) as address:
        assert await generate(address, policy.load(SecurityOptions(tls_ca=files.ca)))


async def test_a_token_says_whose_call_it_is(tokens: str) -> None:
    server = policy.load(SecurityOptions(credentials=tokens))
    async with serving(server) as address:
        assert await generate(address, shown(ALICE)) == "client alice"
        assert await generate(address, shown(BOB)) == "client bob"
        assert await generate(address, server) == "service "
        assert await generate(address, shown(ALICE)) == "client alice"


@pytest.mark.parametrize("token", [None, "wrong-secret-of-the-test", ALICE[:-1], ALICE + "x"])
async def test_a_wrong_token(token: str | None, tokens: str) -> None:
    async with serving(policy.load(SecurityOptions(credentials=tokens))) as address:
        with pytest.raises(Rejected, match="credentials") as caught:
            await generate(address, shown(token))
        assert not any(secret in str(caught.value) for secret in SECRETS)
        assert token is None or token not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic abc", "bearer " + ALICE, "Bearer  " + ALICE]
)
async def test_headers_that_are_no_bearer_token(value: str, tokens: str) -> None:
    server = policy.load(SecurityOptions(credentials=tokens))
    async with serving(server) as address, open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListWorkers(
                router_pb2.ListWorkersRequest(),
                timeout=SECONDS,
                metadata=(("authorization", value),),
            )
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("token", "allowed"), [(ALICE, ""), (SERVICE, "GetStats"), (ADMIN, "GetStats Clear")]
)
async def test_methods_of_others(token: str, allowed: str, tokens: str) -> None:
    async with serving(policy.load(SecurityOptions(credentials=tokens))) as address:
        done = await asyncio.to_thread(_called, address, shown(token))
    assert done == set(allowed.split())


def _called(address: str, protection: Security) -> set[str]:
    """The methods of the store that this channel may call."""
    done = set()
    with open_sync_channel(address, ChannelOptions(security=protection)) as channel:
        for name in ("GetStats", "Clear"):
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            method = channel.unary_unary(f"/kvrelay.v1.StoreService/{name}")
            call = method.future(b"", timeout=SECONDS)
            if call.code() is not grpc.StatusCode.PERMISSION_DENIED:
                done.add(name)
                assert call.result() == b""
    return done


def test_methods_that_are_for_nobody_else() -> None:
    client, service = Caller(CallerKind.CLIENT), Caller(CallerKind.SERVICE)
    assert is_allowed(client, "/kvrelay.v1.RouterService/Generate")
    for method in (
        "DecodeService/Decode",
        "PrefillService/Prefill",
        "WorkerService/GetInfo",
        "StoreService/Get",
        "New/Any",
    ):
        assert not is_allowed(client, f"/kvrelay.v1.{method}")
        assert is_allowed(service, f"/kvrelay.v1.{method}")
    assert not is_allowed(client, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    for method in (
        "WorkerService/Drain",
        "WorkerService/Audit",
        "StoreService/Clear",
        "StoreService/Inspect",
    ):
        assert not is_allowed(service, f"/kvrelay.v1.{method}")


async def test_health_is_open_and_nothing_else(tokens: str) -> None:
    server = policy.load(SecurityOptions(credentials=tokens))
    async with serving(server) as address, open_channel(address) as channel:
        assert await is_serving(channel, Deadline.after(SECONDS))
        listing: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in listing(iter([b""]), timeout=SECONDS)]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stranger_has_no_message_read(tokens: str) -> None:
    """A malformed message would be INVALID_ARGUMENT if it were parsed."""
    server = policy.load(SecurityOptions(credentials=tokens))
    async with serving(server) as address, open_channel(address) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            "/kvrelay.v1.RouterService/Generate"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in call(b"\xff" * 1024, timeout=SECONDS)]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("token", [None, ALICE])
async def test_calls_that_never_say_anything_take_a_part_of_the_places(
    token: str | None, tokens: str
) -> None:
    """A call is open from its headers on, so anyone could fill the server."""
    path = "/grpc.health.v1.Health/Check" if token is None else "/kvrelay.v1.RouterService/Generate"
    server = policy.load(SecurityOptions(credentials=tokens))
    options = ChannelOptions(security=shown(token))
    async with (
        serving(server, calls=CALL_SHARES * 2) as address,
        open_channel(address, options) as mute,
    ):
        opened = [await _begun(mute, path) for _ in range(CALL_SHARES * 3)]
        left = {asyncio.ensure_future(call.code()) for call in opened}
        async with asyncio.timeout(SECONDS):
            while len(left) > 2:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await generate(address, shown(BOB)) == "client bob"
        assert await generate(address, server) == "service "
        async with open_channel(address, ChannelOptions(security=server)) as channel:
            assert await is_serving(channel, Deadline.after(SECONDS))
        assert not any(task.done() for task in left)
        for call in opened:
            call.cancel()
        async with asyncio.timeout(SECONDS):
            while not await _has_a_place(mute, address, token):
                pass


async def test_a_tenant_has_places_for_its_requests_and_two_more(tmp_path: Path) -> None:
    """Two more are refused by the router itself, which says what the limit is."""
    path = tmp_path / "limited.toml"
    path.write_text(
        f'service = "{SERVICE}"\n[tenants.alice]\ntoken = "{ALICE}"\nsalt = "{ALICE}"\n'
        "max-requests = 3\n"
    )
    path.chmod(0o600)
    server = policy.load(SecurityOptions(credentials=str(path)))
    async with (
        serving(server) as address,
        open_channel(address, ChannelOptions(security=shown(ALICE))) as channel,
    ):
        opened = [await _begun(channel, "/kvrelay.v1.RouterService/Generate") for _ in range(9)]
        left = {asyncio.ensure_future(call.code()) for call in opened}
        async with asyncio.timeout(SECONDS):
            while len(left) > 3 + 2:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in left)
        for call in opened:
            call.cancel()


async def test_tenants_together_leave_places_to_services(tmp_path: Path) -> None:
    """There may be more tenants than shares."""
    names = [f"tenant-{number}-with-a-token" for number in range(CALL_SHARES + 2)]
    table = "".join(f'[tenants.{name}]\ntoken = "{name}"\nsalt = "{name}"\n' for name in names)
    path = tmp_path / "many.toml"
    path.write_text(f'service = "{SERVICE}"\n{table}')
    path.chmod(0o600)
    server = policy.load(SecurityOptions(credentials=str(path)))
    async with serving(server, calls=CALL_SHARES * 2) as address, AsyncExitStack() as stack:
        opened = []
        for name in names:
            options = ChannelOptions(security=shown(name))
            channel = await stack.enter_async_context(open_channel(address, options))
            opened += [
                await _begun(channel, "/kvrelay.v1.RouterService/Generate") for _ in range(2)
            ]
        left = {asyncio.ensure_future(call.code()) for call in opened}
        async with asyncio.timeout(SECONDS):
            while len(left) > CALL_SHARES * 2 - 2:  # one share is kept for services
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        assert await generate(address, shown(SERVICE)) == "service "
        for call in opened:
            call.cancel()


async def _has_a_place(channel: grpc.aio.Channel, address: str, token: str | None) -> bool:
    await asyncio.sleep(0.01)
    try:
        if token is None:
            return await is_serving(channel, Deadline.after(SECONDS))
        return await generate(address, shown(token)) == "client alice"
    except Exhausted:
        return False


Mute: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


async def _begun(channel: grpc.aio.Channel, path: str) -> Mute:
    """A call that sends only its headers."""
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    call = method(timeout=SECONDS)
    with suppress(grpc.aio.AioRpcError):  # it was refused already
        await call.wait_for_connection()
    return call


def test_outside_of_a_call_it_is_ourselves() -> None:
    assert caller() == LOCAL_CALLER


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        (SecurityOptions(), "not encrypted.*anyone"),
        (SecurityOptions(token="x" * 20), "anyone"),
    ],
)
def test_an_address_for_others_needs_protection(options: SecurityOptions, lacks: str) -> None:
    with pytest.raises(Rejected, match=lacks):
        policy.load(options).check_listen(Address.parse("0.0.0.0:1"))
    policy.load(replace(options, allow_insecure=True)).check_listen(Address.parse("0.0.0.0:1"))
    policy.load(options).check_listen(Address.parse("127.0.0.1:1"))


def test_tls_alone_lets_everybody_call(party: Callable[..., Files], tokens: str) -> None:
    options, address = party("server").options(), Address.parse("0.0.0.0:1")
    policy.load(options).check_listen(address)
    alone = replace(options, tls_mutual=False)
    with pytest.raises(Rejected, match="anyone"):
        policy.load(alone).check_listen(address)
    policy.load(replace(alone, credentials=tokens)).check_listen(address)


def test_a_token_is_not_sent_in_plain_text() -> None:
    with pytest.raises(Rejected, match="plain text"):
        open_sync_channel("192.0.2.1:1", ChannelOptions(security=shown(ALICE)))
    open_sync_channel("127.0.0.1:1", ChannelOptions(security=shown(ALICE))).close()


def test_secrets_are_in_no_repr(tokens: str, party: Callable[..., Files]) -> None:
    files = party("server")
    options = files.options(tokens, ALICE)
    made = policy.load(options)
    text = repr((options, made, made.credentials, made.credentials.identify(BOB)))
    assert not any(secret in text for secret in SECRETS)
    assert Path(files.key).read_text()[40:80] not in text


def test_what_a_process_shows(tokens: str) -> None:
    for shows, token in ((SERVICE_FIRST, SERVICE), (ADMIN_FIRST, ADMIN)):
        assert credentials.load(SecurityOptions(credentials=tokens), shows).token == token
    assert credentials.load(SecurityOptions(credentials=tokens, token=ALICE)).token == ALICE


def test_old_tokens_and_new_ones_side_by_side(tmp_path: Path) -> None:
    """So tokens can be changed while processes with either one run."""
    text = CREDENTIALS.replace(f'"{SERVICE}"', f'["{NEW}", "{SERVICE}"]')
    text = text.replace(f'"{ALICE}"', f'["{NEW} of alice", "{ALICE}"]')
    known = credentials.load(SecurityOptions(credentials=write_credentials(tmp_path, text)))
    assert known.token == NEW
    assert known.identify(NEW) == known.identify(SERVICE) == Caller(CallerKind.SERVICE)
    old, new = known.identify(ALICE), known.identify(f"{NEW} of alice")
    assert old is not None
    assert old == new
    assert [tenant.name for tenant in known.tenants] == ["alice", "bob"]


def test_salts_differ_and_stay(tokens: str) -> None:
    first, again = (credentials.load(SecurityOptions(credentials=tokens)) for _ in range(2))
    salts = [_salt(first, ALICE), _salt(first, BOB), _salt(again, ALICE)]
    assert salts[0] != salts[1]
    assert salts[0] == salts[2]
    assert all(len(salt) == 32 for salt in salts)


def _salt(known: credentials.Credentials, token: str) -> bytes:
    found = known.identify(token)
    assert found is not None
    return found.tenant.salt


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("service = 'short'", "service: must have 16"),
        ("service = 3", "service: must be text"),
        ("servic = 'x'", "servic: no such entry"),
        ("tenants = 3", "one table for each"),
        ("[tenants.a]\ntoken = 'aaaaaaaaaaaaaaaaaaaa'", "tenants.a.salt: missing"),
        ("[tenants.a]\nsalt = 'aaaaaaaaaaaaaaaaaaaa'", "tenants.a.token: missing"),
        ("[tenants.a]\nmax-request = 3", "tenants.a.max-request: no such entry"),
        (CREDENTIALS + "max-requests = 0", "tenants.bob.max-requests"),
        (CREDENTIALS + "weight = 0", "tenants.bob.weight"),
        (CREDENTIALS + f"[tenants.eve]\ntoken = '{BOB}'", "two of its tokens are equal"),
        (f"service = '{SERVICE}", "is not TOML"),
        ("service = []", "service: an empty list"),
        (f"service = ['{SERVICE}', 'short']", r"service\[1\]: must have 16"),
        (f"service = ['{SERVICE}', '{SERVICE}']", "two of its tokens are equal"),
        (f"fleet = ['{SERVICE}']", "fleet: must be text"),
        ("[tenants.a]\nsalt = 'aaaaaaaaaaaaaaaaaaaa'\ntoken = []", "tenants.a.token: an empty"),
    ],
)
def test_files_that_cannot_be_used(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=says) as caught:
        credentials.load(SecurityOptions(credentials=write_credentials(tmp_path, text)))
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize("field", ["token", "cluster_token", "fleet_key"])
@pytest.mark.parametrize(
    "secret", [f"{ALICE}\n", f"{ALICE}\r\n", "\n", "é" * 20, "short", "x" * 1025]
)
def test_what_the_environment_says_is_checked_like_a_file(
    field: str, secret: str, tokens: str
) -> None:
    """gRPC would end each call, one of them without a status; a short key is no protection."""
    for file in (None, tokens):
        options = SecurityOptions(
            credentials=file,
            token=secret if field == "token" else None,
            cluster_token=secret if field == "cluster_token" else None,
            fleet_key=secret if field == "fleet_key" else None,
        )
        with pytest.raises(Rejected, match=f"^{field}: must") as caught:
            policy.load(options)
        assert secret not in str(caught.value)


def test_a_file_of_brackets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="is not TOML"):
        credentials.load(
            SecurityOptions(credentials=write_credentials(tmp_path, "a = " + "[" * 100_000))
        )


def test_a_file_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_credentials(tmp_path)
    Path(path).chmod(0o644)
    credentials.load(SecurityOptions(credentials=path))
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    "broken",
    ["no key", "key of another", "no file", "no certificate", "no authority", "expired"],
)
def test_certificates_that_cannot_be_used(broken: str, party: Callable[..., Files]) -> None:
    files, other = party("server"), party("other")
    options = {
        "no key": SecurityOptions(tls_cert=files.cert),
        "key of another": SecurityOptions(tls_cert=files.cert, tls_key=other.key),
        "no file": SecurityOptions(tls_cert=files.cert, tls_key=files.key + "x"),
        "no certificate": SecurityOptions(tls_cert=files.key, tls_key=files.key),
        "no authority": SecurityOptions(tls_ca=files.key),
        "expired": party("expired", days=-1).options(),
    }[broken]
    with pytest.raises(Rejected, match="tls_"):
        policy.load(options)


async def test_a_server_cannot_do_with_an_authority_alone(party: Callable[..., Files]) -> None:
    with pytest.raises(KvrelayError, match="tls_cert"):
        async with serving(policy.load(SecurityOptions(tls_ca=party("server").ca))):
            pass


def test_calls_that_cost_nothing_leave_connections_for_others() -> None:
    """A connection with an open call is never closed: health watches must not take them all."""
    calls = OpenCalls(Credentials("token", open=True), share=512, total=3584)
    methods = [f"{HEALTH_PREFIX}Watch", f"{HEALTH_PREFIX}Check", next(iter(OPEN - CLIENTS))]
    entered = [name for name in methods for _ in range(600) if calls.enter(None, name)]
    assert len(entered) == MAX_WATCHING < ServerOptions().max_connections
    request = next(iter(CLIENTS))
    assert all(calls.enter(None, request) for _ in range(600))
    assert calls.enter(Caller(CallerKind.CLIENT, Tenant("a")), request)
    for name in entered:
        calls.leave(None, name)
    assert sum(calls.enter(None, methods[0]) for _ in range(600)) == 512
