"""What a request needed is freed when it ends, however it ends: nothing waits for a collection.

An error keeps the frames that it passed, and a message of megabytes in them, for as long as one of
these frames keeps the error.
"""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx2
import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import router_pb2
from router.http.connection.protocol import BoundedProtocol
from router.http.connection.tls import TlsConnection
from router.http.exchange import Exchange
from router.queue.inbox import Sender
from tests.router.fakes import Behaviour, Running, decode_worker
from tests.router.http.rig import bounded, door, raw
from tests.router.rig import PROMPT, request, until
from tests.secured import OWN_HOST, write_files

BODIES: dict[str, tuple[int, dict[str, object]]] = {
    "answered": (200, {"prompt": PROMPT, "max_tokens": 2}),
    "two prompts": (200, {"prompt": [PROMPT, PROMPT], "max_tokens": 2}),
    "wrong field": (400, {"prompt": PROMPT, "top_p": 7}),
    "one of two prompts too long": (400, {"prompt": [PROMPT, [1] * 9000]}),
    "another model": (404, {"prompt": PROMPT, "model": "another"}),
    "a wrong id after thousands": (400, {"prompt": [1] * 5000 + [-1]}),
    "long text": (400, {"prompt": "word " * 500_000}),
}

LOCAL = Sender(Tenant(), "127.0.0.1").holder
KEPT = (Exchange, router_pb2.GenerateRequest, BoundedProtocol, TlsConnection, ssl.SSLObject)


@contextmanager
def without_collections(found: list[object]) -> Iterator[None]:
    """What only a garbage collection frees of what was made inside is ``found`` afterwards."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [one for one in gc.garbage if isinstance(one, BaseException)]
        found += [one for one in gc.garbage if isinstance(one, KEPT)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture
async def both() -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    async with door() as (router, client):
        await router.generate(request())
        await client.post("/v1/completions", json=BODIES["answered"][1])
        yield router, client


@pytest.mark.parametrize("kind", BODIES)
async def test_over_http(both: tuple[Running, httpx2.AsyncClient], kind: str) -> None:
    status, body = BODIES[kind]
    found: list[object] = []
    before = both[0].service.ended.total()
    with without_collections(found):
        for stream in (False, True):
            answer = await both[1].post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == status, answer.text
        await until(lambda: both[0].service.ended.total() == before + 2)
        await asyncio.sleep(0.1)  # for the rest of their tasks
    assert not found


@pytest.mark.parametrize("model", ["", "another"])
async def test_over_grpc(both: tuple[Running, httpx2.AsyncClient], model: str) -> None:
    asked = request()
    asked.model = model
    found: list[object] = []
    before = both[0].service.ended.total()
    with without_collections(found):
        try:
            await both[0].generate(asked)
        except grpc.RpcError:
            assert model
        await until(lambda: both[0].service.ended.total() == before + 1)
        await asyncio.sleep(0.1)
    assert not found


async def test_a_client_that_leaves_with_requests_behind_the_first() -> None:
    found: list[object] = []
    worker = decode_worker(behaviour=Behaviour(tokens=asyncio.Event()))
    async with bounded(None, worker) as (router, client, server):
        body = json.dumps({"prompt": PROMPT})
        asked = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        )
        with without_collections(found):
            _, writer = await raw(client)
            writer.write(3 * asked.encode())
            await asyncio.wait_for(worker.entered.wait(), 20)
            writer.transport.abort()
            del writer
            await until(lambda: server.connections.open == 0)
            await until(lambda: router.service.ended["cancelled"] == 1)
            await asyncio.sleep(0.1)
    assert not found


@pytest.mark.parametrize("page", ["/v1/completions", "/tokenize", "/detokenize"])
async def test_a_client_that_leaves_within_its_body(page: str) -> None:
    """The exchange has what was received of it."""
    found: list[object] = []
    async with bounded() as (router, client, server):
        inbox = router.service.inbox.semaphore
        assert server._server is not None
        tasks = server._server.server_state.tasks
        with without_collections(found):
            _, writer = await raw(client)
            writer.write(
                f"POST {page} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: 1000000\r\n\r\n{' ' * 100_000}".encode()
            )
            await until(lambda: inbox.held(LOCAL) > 0)
            writer.transport.abort()
            del writer
            await until(lambda: server.connections.open == 0)
            await until(lambda: inbox.held(LOCAL) == 0)
            await until(lambda: not tasks)
    assert not found


@pytest.mark.parametrize("ends", ["silent", "rubbish", "half a head", "answered"])
async def test_connections_over_tls(ends: str, tmp_path: Path) -> None:
    """Each has buffers of 300 KiB."""
    files = write_files(tmp_path, "router", CertificateAuthority())
    security = policy.load(replace(files.options(), tls_mutual=False))
    trust = ssl.create_default_context(cafile=files.ca)
    found: list[object] = []
    async with bounded(security) as (_, client, server):
        port = client.base_url.port
        with without_collections(found):
            for _ in range(3):
                if ends in ("silent", "rubbish"):
                    _, writer = await asyncio.open_connection(OWN_HOST, port)
                    writer.write(b"GET / HTTP/1.1\r\n\r\n" if ends == "rubbish" else b"")
                    await until(lambda: server.connections.open == 1 or ends == "rubbish")
                else:
                    reader, writer = await asyncio.open_connection(OWN_HOST, port, ssl=trust)
                    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
                    if ends == "answered":
                        writer.write(b"\r\n")
                        await reader.readuntil(b"\r\n\r\n")
                writer.transport.abort()
                del writer
            await until(lambda: server.connections.open == 0)
            await asyncio.sleep(0.1)
    ours = [one for one in found if not isinstance(one, ssl.SSLObject) or one.server_side]
    assert not ours
