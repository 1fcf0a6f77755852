"""Long answers, answers that no client reads, and clients that leave while the router waits."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from router.http import exchange
from router.http.connection.table import HttpLimits
from router.http.exchange import PART_BYTES, Exchange
from router.http.shapes import AT_ONCE, LINE_ENDS, dump, dump_parts
from router.queue import inbox
from tests.router.fakes import Behaviour, decode_worker
from tests.router.http.rig import SEED, Keys, bounded, door, raw
from tests.router.rig import PROMPT, until
from tests.secured import OWN_HOST

HEAD = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LONG = json.dumps({"prompt": "x" * 1_000_000, "return_token_strs": True}).encode()
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(scalars, min_size=AT_ONCE - 1, max_size=3 * AT_ONCE)
        | st.dictionaries(st.text(), inner, max_size=5)
    ),
    max_leaves=12,
)


def request(page: bytes, body: bytes) -> bytes:
    return HEAD % page + b"content-length: %d\r\n\r\n" % len(body) + body


async def slow_reader(port: int | None, trust: ssl.SSLContext | None = None) -> Connection:
    """A connection that takes few bytes which are not read."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (OWN_HOST, port))
    name = None if trust is None else "localhost"
    return await asyncio.open_connection(sock=made, limit=1, ssl=trust, server_hostname=name)


@given(values)
def test_parts_are_the_whole(value: object) -> None:
    assert "".join(dump_parts(value)) == dump(value)
    if isinstance(value, list):
        assert "".join(dump_parts({"of": iter(value)})) == dump({"of": value})


def test_no_part_is_long() -> None:
    entry = {"token": "x", "bytes": [1, 2], "top_logprobs": [{"token": "y", "logprob": -1.5}] * 20}
    choice = {"index": 0, "logprobs": {"content": [entry] * 5000}, "token_ids": [7] * 5000}
    parts = list(dump_parts({"choices": [choice] * 3, "tokens": ["t"] * 100_000}))
    assert max(map(len, parts)) <= (AT_ONCE + 1) * len(dump(entry))


def test_ends_of_lines_are_escaped() -> None:
    text = "é".join(LINE_ENDS)
    assert dump(text) == '"\\u0085é\\u2028é\\u2029"'
    assert json.loads(dump(text)) == text


async def test_others_run_while_a_long_answer_is_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "DUMP_SECONDS", 0.0)
    sent: list[Message] = []
    turns = 0

    async def receive() -> Message:
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(turn())
    value = {"tokens": list(range(100_000))}
    made = Exchange({"method": "POST", "headers": []}, receive, send, HttpLimits())
    await made.reply(value)
    other.cancel()
    assert turns > 100_000 / AT_ONCE
    head, *parts = sent
    assert json.loads(b"".join(part["body"] for part in parts)) == value
    assert dict(head["headers"])[b"content-length"] == b"%d" % sum(len(p["body"]) for p in parts)
    assert max(len(part["body"]) for part in parts) < 2 * PART_BYTES
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_whole_answer_that_is_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, at_once: bool, keys: Keys
) -> None:
    """Also one that is complete for the application, and waits in the connection only."""
    if at_once:
        monkeypatch.setattr(exchange, "PART_BYTES", 1 << 30)
    security, trust = keys
    async with bounded(security, stuck_seconds=0.4) as (_, client, server):
        _, writer = await slow_reader(client.base_url.port, trust)
        writer.write(request(b"tokenize", LONG))
        await until(lambda: server.connections.open == 1)
        await until(lambda: server.connections.open == 0)
        writer.close()


async def test_an_answer_that_is_read_slowly_is_whole(keys: Keys) -> None:
    """About 1 MB a second; while a system's buffer is full, the server's own does not change."""
    security, trust = keys
    async with bounded(security, stuck_seconds=0.4) as (_, client, _):
        reader, writer = await slow_reader(client.base_url.port, trust)
        writer.write(request(b"tokenize", LONG))
        head = bytearray()
        while not head.endswith(b"\r\n\r\n"):
            head += await reader.readexactly(1)
        (told,) = (line for line in head.splitlines() if line.startswith(b"content-length"))
        left = int(told.split()[1])
        while left:
            await asyncio.sleep(0.002)
            part = await reader.read(min(left, 4096))
            assert part, f"{left} bytes are missing"
            left -= len(part)
        writer.close()


def read_slowly(port: int | None, sent: bytes, trust: ssl.SSLContext | None) -> int:
    """The bytes of a response; those behind 6 MiB are read slowly, in two seconds."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect((OWN_HOST, port))
        one = made if trust is None else trust.wrap_socket(made, server_hostname="localhost")
        with one:
            one.sendall(sent)
            size = 0
            while part := one.recv(16384):
                size += len(part)
                if size > 6 << 20:
                    time.sleep(0.05)
    return size


async def test_the_last_answer_is_whole_however_slowly_it_is_read(
    monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    """The time in which TLS must be closed begins when the client has everything."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.3)
    security, trust = keys
    async with bounded(security, stuck_seconds=5.0) as (_, client, server):
        head = HEAD % b"tokenize" + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(LONG)
        size = await asyncio.to_thread(read_slowly, client.base_url.port, head + LONG, trust)
        assert size > 7_000_000
        await until(lambda: server.connections.open == 0)


@pytest.mark.parametrize("behind", [b"}", b"GET /hea"])
async def test_what_stands_behind_a_request_does_not_cut_its_long_answer(behind: bytes) -> None:
    """Not even after the time in which a head must be whole."""
    step = asyncio.Semaphore(1)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with bounded(None, worker, head_seconds=0.2) as (_, client, server):
        reader, writer = await raw(client)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "stream": True, "seed": SEED})
        writer.write(request(b"v1/completions", body.encode()))
        found = await reader.readuntil(b"data: ")
        writer.write(behind)
        await asyncio.sleep(0.6)
        for _ in range(5):
            step.release()
        async with asyncio.timeout(10):
            found += await reader.read()
        assert found.count(b"HTTP/1.1") == 1
        assert b"data: [DONE]" in found
        writer.close()
        await until(lambda: server.connections.open == 0)


async def test_a_connection_with_a_second_request_is_not_idle() -> None:
    """So it does not make room for another connection."""
    tokens = asyncio.Event()
    worker = decode_worker(behaviour=Behaviour(tokens=tokens))
    async with bounded(None, worker, connections=1) as (_, client, _):
        reader, writer = await raw(client)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "seed": SEED}).encode()
        first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(first + request(b"v1/completions", body))
        await asyncio.wait_for(worker.entered.wait(), 20)
        other, _ = await raw(client)
        assert await asyncio.wait_for(other.read(), 20) == b""
        tokens.set()
        async with asyncio.timeout(20):
            found = await reader.readuntil(b'"usage"')
        assert found.count(b"HTTP/1.1 200") == 2
        writer.close()


async def test_the_end_of_the_router_is_no_error_for_who_does_not_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()
    write = Exchange._write

    async def watched(one: Exchange, message: dict[str, object]) -> None:
        asyncio.get_running_loop().call_later(0.3, stuck.set)
        await write(one, message)
        if message["type"] == "http.response.body" and message["more_body"]:
            stuck.clear()

    monkeypatch.setattr(Exchange, "_write", watched)
    async with bounded() as (_, client, server):
        _, writer = await slow_reader(client.base_url.port)
        writer.write(request(b"tokenize", LONG))
        await asyncio.wait_for(stuck.wait(), 20)
        await server.stop()
        assert not [one for one in caplog.records if one.name == "uvicorn.error"]
        writer.close()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has memory for one body, and no time limit for reading it."""
    monkeypatch.setattr(inbox, "INBOX_BYTES", 1)
    monkeypatch.setattr(inbox, "READ_SECONDS", 1000.0)


@pytest.mark.usefixtures("crowded")
async def test_who_leaves_while_its_long_body_waits_is_seen() -> None:
    """While the body waits for memory the router does not read, so it reads no end either."""
    async with bounded() as (router, client, _):
        waits = router.service.inbox.semaphore
        made = [await raw(client) for _ in range(5)]
        for _, writer in made:
            writer.write(HEAD % b"v1/completions" + b"content-length: 8000000\r\n\r\n")
            writer.write(b" " * (2 * inbox.SMALL_BYTES))  # all of it fits the buffers
        await until(lambda: waits.waiting == 4)
        await asyncio.sleep(0.2)
        reading = [writer for _, writer in made if not writer.transport.is_closing()]
        assert len(reading) == 5
        for _, writer in made[1:3]:
            writer.transport.abort()
        await until(lambda: waits.waiting == 2)
        for _, writer in made:
            writer.transport.abort()
        await until(lambda: waits.waiting == 0)


async def test_who_leaves_behind_much_that_it_has_sent_is_seen() -> None:
    worker = decode_worker(behaviour=Behaviour(tokens=asyncio.Event()))
    async with door([worker]) as (router, client):
        _, writer = await raw(client)
        writer.write(request(b"v1/completions", json.dumps({"prompt": PROMPT}).encode()))
        await asyncio.wait_for(worker.entered.wait(), 20)
        writer.write(request(b"v1/completions", b" " * 100_000))
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await asyncio.wait_for(worker.cancelled.wait(), 20)
        await until(lambda: router.service.ended["cancelled"] >= 1)


async def test_trailers_are_no_headers() -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    async with bounded() as (_, client, _):
        reader, writer = await raw(client)
        writer.write(
            HEAD % b"v1/completions"
            + b"transfer-encoding: chunked\r\nx-request-id: head\r\n\r\n"
            + b"%x\r\n%s\r\n0\r\n" % (len(body), body)
            + b"x-request-id: trailer\r\ncontent-encoding: gzip\r\n\r\n"
        )
        answered = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert answered.startswith(b"HTTP/1.1 200")
        assert b"x-request-id: head\r\n" in answered
        writer.close()


async def test_the_name_of_a_field_is_cut_in_an_error() -> None:
    async with bounded() as (_, client, _):
        name = "z" * 100_000
        body = {"prompt": PROMPT, "structured_outputs": {"regex": "a", name: 1}}
        made = await client.post("/v1/completions", json=body)
        assert made.status_code == 400
        assert len(made.content) < 5000
