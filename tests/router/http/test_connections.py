"""The end of connections: a response can be read by clients that still send, and by HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import httpx2
import pytest
from starlette.types import Message

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.errors import Unavailable
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.policy import Security
from router.http.connection.protocol import BoundedProtocol
from router.http.connection.table import HttpLimits
from router.http.exchange import Exchange
from tests.router.fakes import Behaviour, decode_worker
from tests.router.http.rig import SEED, bounded, door, expected, raw
from tests.router.rig import PROMPT, until
from tests.secured import OWN_HOST, write_files

GOOD: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED}
JSON = b"host: x\r\ncontent-type: application/json\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\n" + JSON
PIECE = b"x" * 100_000
PIECES = 400  # 40 MB


def large(framing: str) -> Iterator[bytes]:
    """A request of 40 MB that ends its connection."""
    length = b"content-length: %d" % (len(PIECE) * PIECES)
    chunked = framing == "chunked"
    yield HEAD + b"connection: close\r\n"
    yield (b"transfer-encoding: chunked" if chunked else length) + b"\r\n\r\n"
    for _ in range(PIECES):
        yield b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE
    if chunked:
        yield b"0\r\n\r\n"


def sent_first(port: int, request: Iterator[bytes], trust: ssl.SSLContext | None) -> bytes:
    """The answer to a client that sends all of its request before it reads."""
    with socket.create_connection((OWN_HOST, port), timeout=60) as made:
        stream = made if trust is None else trust.wrap_socket(made, server_hostname=OWN_HOST)
        with stream:
            for piece in request:
                stream.sendall(piece)
            answer = b""
            while not answer.endswith(b"}}"):
                answer += (got := stream.recv(65536))
                assert got, answer
            return answer


async def test_small_events_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm holds a token until the client's system acknowledges the one before."""
    connected, unheld = BoundedProtocol.connection_made, list[int]()

    def note(self: BoundedProtocol, transport: asyncio.BaseTransport) -> None:
        connected(self, transport)
        made = transport.get_extra_info("socket")
        unheld.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(BoundedProtocol, "connection_made", note)
    async with door([decode_worker()]) as (_, client):
        (await client.post("/v1/completions", json=GOOD)).raise_for_status()
    assert unheld
    assert all(unheld)


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_that_sends_too_much_reads_why(
    framing: str, encrypted: bool, tmp_path: Path
) -> None:
    security, trust = Security(), None
    if encrypted:
        files = write_files(tmp_path, "router", CertificateAuthority())
        security = policy.load(replace(files.options(), tls_mutual=False))
        trust = ssl.create_default_context(cafile=files.ca)
    async with bounded(security) as (_, client, server):
        port = client.base_url.port
        assert port is not None
        answer = await asyncio.to_thread(sent_first, port, large(framing), trust)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 413 " in head
        assert b"connection: close" in head
        assert "more than" in json.loads(body)["error"]["message"]
        async with asyncio.timeout(10):
            while server.connections.open:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("limits", "sends"),
    [(HttpLimits(unread_bytes=1_000_000), True), (HttpLimits(body_seconds=0.3), False)],
)
async def test_what_is_unread_is_bounded(limits: HttpLimits, sends: bool) -> None:
    changes = asdict(replace(limits, body_bytes=1000))
    async with bounded(**changes) as (_, client, server):
        reader, writer = await raw(client)
        writer.write(HEAD + b"connection: close\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in await reader.readline()
        async with asyncio.timeout(10):
            while server.connections.open:
                if sends:
                    writer.write(PIECE)
                await asyncio.sleep(0.001)
        writer.close()


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (HEAD + b"content-length: 99999999\r\n\r\n", b"x"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
    ],
)
async def test_a_connection_that_sends_a_little_after_its_answer_is_idle(
    request_: bytes, more: bytes
) -> None:
    async with bounded(idle_seconds=1.0) as (_, client, _):
        reader, writer = await raw(client)
        writer.write(request_)
        assert b"HTTP/1.1" in await reader.readline()
        writer.write(more)
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()


async def test_many_requests_sent_at_once_are_all_answered() -> None:
    """Their heads are larger than one may be, and the last one is cut."""
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    async with bounded(head_bytes=1024) as (_, client, _):
        reader, writer = await raw(client)
        writer.write((head + b"\r\n") * 99 + head)
        await writer.drain()
        async with asyncio.timeout(20):
            for count in range(100):
                if count == 99:
                    writer.write(b"connection: close\r\n\r\n")
                answered = await reader.readuntil(b'{"status":"ok"}')
                assert answered.startswith(b"HTTP/1.1 200"), count
            assert not await reader.read()
        writer.close()


async def test_a_client_that_leaves_before_it_is_refused_is_no_error() -> None:
    """It leaves in the turn of the event loop in which its time for a head ends."""
    errors: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with bounded(head_seconds=0.2) as (_, client, server):
        made = socket.create_connection((OWN_HOST, client.base_url.port))
        async with asyncio.timeout(20):
            while not server.connections.open:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
            loop.call_soon(made.close)  # before timers, and the loop has looked at its sockets
            time.sleep(0.3)  # noqa: ASYNC251 - the timer is due in the next turn
            while server.connections.open:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
    assert not errors


WRONG_BODY = HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"


@pytest.mark.parametrize("behind", [b"rubbish\r\n\r\n", WRONG_BODY])
async def test_rubbish_behind_a_request_is_not_answered_within_its_stream(behind: bytes) -> None:
    """The stream is whole, and the connection ends with it."""
    worker = decode_worker()
    worker.behaviour.step = asyncio.Semaphore(10)
    async with door([worker]) as (_, client):
        reader, writer = await raw(client)
        body = json.dumps({**GOOD, "max_tokens": 30, "stream": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        found = await reader.readuntil(b"data: ")
        writer.write(behind)
        await asyncio.sleep(0.1)
        for _ in range(20):
            worker.behaviour.step.release()
        async with asyncio.timeout(10):
            found += await reader.read()
        assert found.count(b"HTTP/1.1") == 1
        assert b"data: [DONE]" in found
        writer.close()


async def test_http_1_0_reads_streams_to_their_end() -> None:
    """It has no chunks: the end of the connection is that of the answer."""
    async with door() as (_, client):
        for stream in (False, True):
            body = json.dumps({**GOOD, "stream": stream}).encode()
            head, content = await old(client, b"POST /v1/completions", body)
            assert b"transfer-encoding" not in head
            assert (b"content-length: " in head) is not stream
            texts = content.decode().split("\n\n") if stream else [content.decode()]
            if stream:
                assert texts[-2:] == ["data: [DONE]", ""]
                texts = [text.partition("data: ")[2] for text in texts[:-2]]
            chunks = [json.loads(text) for text in texts]
            assert "".join(one["choices"][0]["text"] for one in chunks) == expected(3)
        head, content = await old(client, b"HEAD /health", b"")
        assert b"200" in head
        assert content == b""
        assert json.loads((await old(client, b"GET /health", b""))[1]) == {"status": "ok"}


async def old(client: httpx2.AsyncClient, line: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to HTTP/1.0."""
    reader, writer = await raw(client)
    length = b"content-length: %d\r\n\r\n" % len(body)
    writer.write(line + b" HTTP/1.0\r\n" + JSON + length + body)
    async with asyncio.timeout(10):
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), content


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("body", [b"zz\r\n", b"2\r\n{}}\r\n", b"1\r\n{\r\n-1\r\n"])
async def test_a_body_whose_chunks_are_wrong_is_refused(body: bytes, apart: bool) -> None:
    async with bounded() as (_, client, server):
        reader, writer = await raw(client)
        head = HEAD + b"transfer-encoding: chunked\r\n"
        if apart:
            writer.write(head + b"expect: 100-continue\r\n\r\n")
            async with asyncio.timeout(10):
                await reader.readuntil(b"100 Continue\r\n\r\n")  # it waits for the body
            writer.write(body)
        else:
            writer.write(head + b"\r\n" + body)
        async with asyncio.timeout(10):
            answered = await reader.read()
        assert answered.startswith(b"HTTP/1.1 400"), answered
        assert answered.count(b"HTTP/1.1") == 1
        assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
        writer.close()
        async with asyncio.timeout(10):
            while server.connections.open:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("rubbish", [b"rubbish\r\n\r\n", b"}"])
async def test_rubbish_behind_a_request_that_is_computed_is_not_its_answer(rubbish: bytes) -> None:
    """It is answered, and the connection ends: its length may have been too small."""
    worker = decode_worker()
    worker.behaviour.tokens = asyncio.Event()
    async with door([worker]) as (_, client):
        reader, writer = await raw(client)
        body = json.dumps(GOOD).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            await worker.entered.wait()
            writer.write(rubbish)
            await asyncio.sleep(0.1)
            worker.behaviour.tokens.set()
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert json.loads(content)["choices"][0]["text"] == expected(3)
        writer.close()


@pytest.mark.parametrize("hosts", [0, 2])
async def test_a_request_names_its_host_once(hosts: int) -> None:
    async with door() as (_, client):
        reader, writer = await raw(client)
        writer.write(b"GET /health HTTP/1.1\r\n" + b"host: x\r\n" * hosts + b"\r\n")
        async with asyncio.timeout(10):
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(content)["error"]["message"] == (
            f"request: needs one Host header, got {hosts}"
        )
        writer.close()


async def test_handshakes_are_counted_and_bounded(tmp_path: Path) -> None:
    """Connections that never begin TLS: they make room, and end."""
    files = write_files(tmp_path, "router", CertificateAuthority())
    security = policy.load(replace(files.options(), tls_mutual=False))
    trust = ssl.create_default_context(cafile=files.ca)
    limits: dict[str, object] = {"connections": 60, "connections_per_host": 40, "head_seconds": 1.0}
    async with bounded(security, **limits) as (_, client, server):
        port = client.base_url.port
        silent = [await asyncio.open_connection(OWN_HOST, port) for _ in range(100)]
        await until(lambda: server.connections.open >= 30)
        assert server.connections.open <= 31  # half of all places are for one host
        reader, writer = await asyncio.open_connection(OWN_HOST, port, ssl=trust)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        await until(lambda: server.connections.open == 1)  # their second is over
        writer.close()
        for _, one in silent:
            one.close()
        await until(lambda: server.connections.open == 0)


@pytest.mark.parametrize("reason", ["peer did not return a certificate", "http request"])
async def test_why_there_is_no_tls_is_told(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kvrelay.router")
    files = write_files(tmp_path, "router", CertificateAuthority())
    trust = ssl.create_default_context(cafile=files.ca) if reason != "http request" else None
    async with bounded(policy.load(files.options())) as (_, client, _):
        where = OWN_HOST, client.base_url.port
        reader, writer = await asyncio.open_connection(*where, ssl=trust)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        if trust is not None:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                await reader.read()
        await until(lambda: bool(re.search(f"no TLS with .*{reason}", caplog.text)))
        writer.transport.abort()


async def test_an_unanswered_request_is_told_that_the_router_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the end of the grace; uvicorn's own answer is 500, which no client sends again."""
    async with bounded() as (_, client, server):
        reader, writer = await raw(client)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        serving = server._server
        assert serving is not None
        await until(lambda: bool(serving.server_state.tasks))
        await server.stop()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"this router ends: ask another one" in answer
        assert not [one for one in caplog.records if one.name == "uvicorn.error"]
        writer.close()


@pytest.mark.parametrize("part", ["start", "body"])
async def test_a_client_that_reads_nothing_gets_no_error(part: str) -> None:
    """It would wait for its reader for ever: nothing watches a response whose router ends."""
    sent: list[Message] = []
    stuck = asyncio.Event()
    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == f"http.response.{part}":
            stuck.set()
            await asyncio.Future()

    exchange = Exchange({"method": "POST", "headers": []}, receive, send, HttpLimits())

    async def serve() -> None:
        async with exchange.attended():
            await exchange.write("data: 1\n\n")

    serving = asyncio.create_task(serve())
    await asyncio.wait_for(stuck.wait(), 20)
    serving.cancel()
    await asyncio.wait((serving,))
    async with asyncio.timeout(20):
        await exchange.fail(Unavailable("this router ends: ask another one"))
    assert len(sent) == 1 + (part == "body")


async def test_a_stream_is_told_that_the_router_ends(caplog: pytest.LogCaptureFixture) -> None:
    """The event is its last one: its client can resume at another router."""
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(1)))
    async with bounded(None, worker) as (_, client, server):
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            await server.stop()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert json.loads(rest[0].removeprefix("data: "))["error"]["type"] == "server_error"
        assert "this router ends: ask another one" in rest[0]
        assert rest[1:] == ["data: [DONE]"]
        assert not [one for one in caplog.records if one.name == "uvicorn.error"]
