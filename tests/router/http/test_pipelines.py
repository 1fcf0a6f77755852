"""Requests on one connection that arrive at once, in pieces, or behind one that is answered."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import weakref

import pytest
from starlette.types import Receive, Scope, Send

from kvrelay.rpc.address import Address
from router.http.connection.protocol import PIECE_BYTES, BoundedProtocol
from router.http.connection.table import HttpLimits
from router.http.connection.wire import READ_BYTES
from router.http.server import HttpServer
from tests.router.fakes import Behaviour, decode_worker
from tests.router.http.rig import SEED, Keys, bounded, raw
from tests.router.http.test_unread import HEAD, request, slow_reader
from tests.router.rig import PROMPT, until
from tests.secured import OWN_HOST

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
REFUSED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
OLD = (
    b"POST /tokenize HTTP/1.0\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def completion(**more: object) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED, **more}
    return request(b"v1/completions", json.dumps(body).encode())


def connections(server: HttpServer) -> list[BoundedProtocol]:
    assert server._server is not None
    return [
        one for one in server._server.server_state.connections if isinstance(one, BoundedProtocol)
    ]


async def test_few_requests_wait_however_many_are_sent() -> None:
    """Also while answers are sent: each lets in no more than it takes away."""
    async with bounded() as (_, client, server):
        reader, writer = await raw(client)
        most = 0
        answered = 0
        for _ in range(60):
            writer.write(GET * 500)
            found = await asyncio.wait_for(reader.read(1 << 20), 20)
            answered += found.count(b"HTTP/1.1 200")
            (one,) = connections(server)
            most = max(most, len(one._requests))
            assert len(one._waiting) <= 2 * READ_BYTES
        assert 1 < most <= PIECE_BYTES // len(GET) + 2
        assert answered > 60
        while answered < 60 * 500:
            found = await asyncio.wait_for(reader.readexactly(1), 20)
            answered += (found + await reader.read(1 << 20)).count(b"TP/1.1 200")
        writer.close()


async def test_a_body_behind_many_requests_is_bounded() -> None:
    async with bounded() as (_, client, server):
        _, writer = await raw(client)
        writer.write(GET * 300 + HEAD % b"tokenize" + CHUNKED)
        sent = 0
        for _ in range(200):
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent += 65536
            await asyncio.sleep(0.001)
        (one,) = connections(server)
        assert len(one._waiting) + sum(len(each.body) for each in one._requests) < 4 * 65536 < sent
        writer.transport.abort()


@pytest.mark.parametrize("part", ["field", "extension", "blank lines"])
@pytest.mark.parametrize("refused", [False, True])
async def test_what_stands_around_a_body_is_bounded(part: str, refused: bool) -> None:
    """An endless trailer is kept whole by the parser."""
    before = {"field": b"0\r\nx: ", "extension": b"1;x=", "blank lines": b"0\r\n\r\n"}[part]
    filler = b"\r\n" if part == "blank lines" else b"y"
    async with bounded(head_bytes=4096, idle_seconds=60) as (_, client, server):
        reader, writer = await raw(client)
        head = REFUSED if refused else HEAD % b"v1/completions"
        writer.write(head + CHUNKED + before)
        found = b""
        if part == "blank lines":
            found = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        for _ in range(200):
            writer.write(filler * 1000)
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            found += await reader.read()
        assert found.count(b"HTTP/1.1 ") == 1 + (part == "blank lines")
        assert (b" 431 " in found) == (not refused or part == "blank lines")
        writer.close()
        await until(lambda: server.connections.open == 0)


@pytest.mark.parametrize("size", [1, 1400, 1 << 20])
async def test_a_head_has_one_size_however_it_arrives(size: int) -> None:
    fields = b"".join(b"x-%d: %s\r\n" % (i, b"z" * 200) for i in range(20))
    head = GET[:-2] + fields + b"\r\n"
    for limit, status in ((len(head), b"200"), (len(head) - 2 * PIECE_BYTES - 1, b"431")):
        async with bounded(head_bytes=limit) as (_, client, _):
            reader, writer = await raw(client)
            for at in range(0, len(head), size):
                writer.write(head[at : at + size])
                await asyncio.sleep(0)
            answered = await asyncio.wait_for(reader.readline(), 20)
            assert answered.split()[1] == status
            writer.close()


@pytest.mark.parametrize("cut", [0, 20, 60])
async def test_a_connection_with_a_second_request_in_pieces_is_not_idle(cut: int) -> None:
    tokens = asyncio.Event()
    worker = decode_worker(behaviour=Behaviour(tokens=tokens))
    async with bounded(None, worker, connections=1) as (_, client, _):
        reader, writer = await raw(client)
        second = completion()
        writer.write(GET + second[:cut])
        await asyncio.wait_for(reader.readuntil(b'"ok"}'), 20)
        writer.write(second[cut:])
        await asyncio.wait_for(worker.entered.wait(), 20)
        other, _ = await raw(client)
        assert await asyncio.wait_for(other.read(), 20) == b""
        tokens.set()
        assert b"200" in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


async def test_a_head_is_not_late_while_the_router_reads_nothing() -> None:
    step = asyncio.Semaphore(1)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with bounded(None, worker, head_seconds=0.2) as (_, client, _):
        reader, writer = await raw(client)
        writer.write(completion(stream=True))
        await asyncio.wait_for(reader.readuntil(b"data: "), 20)
        writer.write(GET + b"GET /ready HTTP/1.1\r\nho")
        await asyncio.sleep(0.05)
        writer.write(b"st: x\r\n\r\n")
        await asyncio.sleep(0.5)
        for _ in range(3):
            step.release()
        async with asyncio.timeout(20):
            await reader.readuntil(b"[DONE]")
            await reader.readuntil(b'"ok"}')
            await reader.readuntil(b"HTTP/1.1 200")
        writer.close()


async def test_bodies_of_refused_requests_do_not_add_up() -> None:
    async with bounded(unread_bytes=300_000) as (_, client, _):
        reader, writer = await raw(client)
        for _ in range(8):
            writer.write(REFUSED + b"content-length: 200000\r\n\r\n")
            answered = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
            assert answered.startswith(b"HTTP/1.1 415")
            writer.write(b" " * 200_000)
            await writer.drain()
        writer.close()


async def test_the_rest_of_an_answered_request_gets_no_answer_of_its_own() -> None:
    async with bounded() as (_, client, _):
        reader, writer = await raw(client)
        writer.write(REFUSED + CHUNKED + b"5\r\nhello\r\n")
        await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        writer.write(b"zz\r\n")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


@pytest.mark.parametrize(
    "second",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\nbehind it",
        b"GET http:///x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"rubbish\r\n\r\n",
    ],
)
async def test_a_second_request_that_is_wrong_gets_an_answer(second: bytes) -> None:
    async with bounded() as (_, client, server):
        reader, writer = await raw(client)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b'"ok"}'), 20)
        writer.write(second)
        found = await asyncio.wait_for(reader.read(), 20)
        assert found.startswith(b"HTTP/1.1 400")
        writer.close()
        await until(lambda: server.connections.open == 0)


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_leaves_rubbish_behind_is_no_error(
    at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with bounded() as (_, client, server):
        for _ in range(4):
            reader, writer = await raw(client)
            writer.write(completion(stream=True, max_tokens=300) + b"rubbish\r\n\r\n")
            if not at_once:
                await asyncio.wait_for(reader.readuntil(b"data: "), 20)
            writer.transport.abort()
        await until(lambda: server.connections.open == 0)
        await asyncio.sleep(0.2)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_has_ended_is_freed_at_once(reset: bool) -> None:
    async with bounded() as (_, client, server):
        reader, writer = await raw(client)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b'"ok"}'), 20)
        one = weakref.ref(connections(server)[0])
        made = writer.get_extra_info("socket")
        if reset:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: one() is None)


async def test_a_blank_line_behind_the_last_request_does_not_delay_the_end(keys: Keys) -> None:
    """Over TLS the end of a response to HTTP/1.0 is told by that of the connection alone."""
    security, trust = keys
    tokens = asyncio.Event()
    worker = decode_worker(behaviour=Behaviour(tokens=tokens))
    async with bounded(security, worker) as (_, client, _):
        name = None if trust is None else "localhost"
        reader, writer = await asyncio.open_connection(
            OWN_HOST, client.base_url.port, ssl=trust, server_hostname=name
        )
        writer.write(completion(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        await asyncio.wait_for(worker.entered.wait(), 20)
        writer.write(b"\r\n")
        await asyncio.sleep(0.1)
        tokens.set()
        found = await asyncio.wait_for(reader.read(), 10)
        assert b"[DONE]" in found
        writer.close()


async def test_the_last_answer_says_that_it_is_the_last(keys: Keys) -> None:
    security, trust = keys
    async with bounded(security) as (_, client, server):
        name = None if trust is None else "localhost"
        reader, writer = await asyncio.open_connection(
            OWN_HOST, client.base_url.port, ssl=trust, server_hostname=name
        )
        writer.write(GET + GET + b"rubbish\r\n\r\n")
        for last in (False, True):
            found = await asyncio.wait_for(reader.readuntil(b'"ok"}'), 20)
            assert (b"connection: close" in found) == last
        writer.close()
        await until(lambda: server.connections.open == 0)


async def test_a_refused_body_is_not_asked_for() -> None:
    async with bounded(body_seconds=1000.0) as (_, client, server):
        reader, writer = await raw(client)
        writer.write(HEAD % b"v1/completions" + b"expect: 100-continue\r\n" + CHUNKED + b"zz\r\n")
        found = await asyncio.wait_for(reader.read(), 20)
        assert found.startswith(b"HTTP/1.1 400")
        assert found.count(b"HTTP/1.1") == 1
        inner = server._server
        assert inner is not None
        await until(lambda: not inner.server_state.tasks)
        await asyncio.wait_for(server.stop(5), 3)
        writer.close()


@pytest.mark.parametrize("later", [False, True])
async def test_requests_behind_the_last_one_do_not_cut_its_answer(later: bool) -> None:
    """Nor if they are sent after it is written."""
    server = HttpServer(long_page, Address(OWN_HOST, 0), HttpLimits())
    url = await server.start()
    try:
        reader, writer = await slow_reader(int(url.rpartition(":")[2]))
        writer.write(b"GET /long HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        if later:
            await asyncio.sleep(0.2)
        writer.write(GET * 30_000)
        await asyncio.sleep(0.2)
        size = 0
        async with asyncio.timeout(60):
            while part := await reader.read(1 << 20):
                size += len(part)
        assert 4 << 20 < size < (4 << 20) + 1000
        writer.close()
    finally:
        await server.stop()


async def test_an_unusual_request_may_be_the_last_one() -> None:
    wish = GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with bounded() as (_, client, _):
        reader, writer = await raw(client)
        writer.write(wish + GET[:-2] + b"connection: close\r\n\r\n" + GET)
        found = await asyncio.wait_for(reader.read(), 20)
        assert found.count(b"HTTP/1.1 200") == 2
        writer.close()


async def test_at_the_end_no_request_that_waits_begins() -> None:
    worker = decode_worker(behaviour=Behaviour(tokens=asyncio.Event()))
    async with bounded(None, worker) as (_, client, server):
        reader, writer = await raw(client)
        writer.write(completion() + completion())
        await asyncio.wait_for(worker.entered.wait(), 20)
        await server.stop()
        found = await asyncio.wait_for(reader.read(), 20)
        assert found.count(b"HTTP/1.1 503") == 1
        assert len(worker.legs) == 1
        writer.close()


async def long_page(scope: Scope, receive: Receive, send: Send) -> None:
    """A page that nothing watches but its connection."""
    body = b"x" * (4 << 20) if scope["path"] == "/long" else b"short"
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:], "more_body": False})


async def test_a_page_that_is_not_read_is_dropped() -> None:
    server = HttpServer(long_page, Address(OWN_HOST, 0), HttpLimits(stuck_seconds=0.4))
    url = await server.start()
    try:
        _, writer = await slow_reader(int(url.rpartition(":")[2]))
        writer.write(GET.replace(b"health", b"long"))
        await until(lambda: server.connections.open == 1)
        await until(lambda: server.connections.open == 0)
        writer.close()
    finally:
        await server.stop()


async def test_who_still_reads_an_answer_makes_no_room_before_others() -> None:
    limits = HttpLimits(connections=4)  # two for each host
    server = HttpServer(long_page, Address(OWN_HOST, 0), limits)
    url = await server.start()
    try:
        port = int(url.rpartition(":")[2])
        reader, writer = await slow_reader(port)
        writer.write(GET.replace(b"health", b"long"))
        (slow,) = connections(server)
        await until(lambda: slow._answered == 1 and slow.writes)
        idle, _ = await asyncio.open_connection(OWN_HOST, port)
        last, _ = await asyncio.open_connection(OWN_HOST, port)
        assert await asyncio.wait_for(idle.read(), 20) == b""
        async with asyncio.timeout(60):
            size = 0
            while size < 4 << 20:
                size += len(part := await reader.read(1 << 20))
                assert part, size
        assert not last.at_eof()
        writer.close()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET http://x HTTP/1.1\r\nhost: x\r\n\r\n", b"404", b"'/'"),
        (b"GET http://x?y=1 HTTP/1.1\r\nhost: x\r\n\r\n", b"404", b"'/'"),
        (b"GET http://x/health HTTP/1.1\r\nhost: x\r\n\r\n", b"200", b"ok"),
        (b"GET /health%0a HTTP/1.1\r\nhost: x\r\n\r\n", b"404", b", /v1/models/{model}"),
        (OLD, b"400", b"prompt"),
    ],
)
async def test_a_request_that_is_unusual(head: bytes, status: bytes, words: bytes) -> None:
    async with bounded() as (_, client, _):
        reader, writer = await raw(client)
        writer.write(head)
        answered = await asyncio.wait_for(reader.readuntil(b"}"), 20)
        assert answered.split()[1] == status
        assert words in answered
        writer.close()


async def test_many_wishes_for_another_protocol_at_once() -> None:
    wish = GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with bounded() as (_, client, _):
        reader, writer = await raw(client)
        writer.write(wish * 600)
        async with asyncio.timeout(20):
            for _ in range(600):
                assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200")
        writer.close()
