"""A router with an HTTP door in front of fake workers, and clients of it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
from openai import AsyncOpenAI

from kvrelay.rpc.address import Address
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.policy import Security
from router.http.access import Access
from router.http.app import make_app
from router.http.connection.table import HttpLimits
from router.http.resume import with_checksum
from router.http.server import HttpServer
from tests.router.fakes import FakeWorker, Running, answer, decode_worker, running, text_of
from tests.router.rig import PROMPT
from tests.secured import OWN_HOST

SEED = 5
Keys = tuple[Security | None, ssl.SSLContext | None]
Event = tuple[str, str]


@asynccontextmanager
async def door(
    workers: Sequence[FakeWorker] = (), **changes: object
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """A router with a door, and a plain client of it."""
    given = {"http_port": 0, "disaggregate": "never", **changes}
    async with (
        running(workers or [decode_worker()], **given) as router,  # type: ignore[arg-type]
        httpx2.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        yield router, client


@asynccontextmanager
async def bounded(
    security: Security | None = None, worker: FakeWorker | None = None, /, **changes: object
) -> AsyncIterator[tuple[Running, httpx2.AsyncClient, HttpServer]]:
    """A door with other limits."""
    limits = replace(HttpLimits(), **changes)  # type: ignore[arg-type]
    async with running([worker or decode_worker()], disaggregate="never") as router:
        app = make_app(
            router.service, Access(lambda: policy.INSECURE.credentials, 100), limits, bytes
        )
        server = HttpServer(app, Address(OWN_HOST, 0), limits)
        url = await server.start(security)
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
                yield router, client, server
        finally:
            await server.stop()


async def raw(client: httpx2.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server of a client."""
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)


def openai_of(router: Running, key: str = "none", **options: object) -> AsyncOpenAI:
    """OpenAI's own client of the door; it does not retry by itself."""
    url = f"{router.http}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20, **options)  # type: ignore[arg-type]


def expected(max_tokens: int, seed: int = SEED) -> str:
    """The text of an undisturbed answer to ``PROMPT``."""
    return text_of(answer(PROMPT, max_tokens, seed))


async def events(
    client: httpx2.AsyncClient,
    body: Mapping[str, object],
    page: str = "/v1/completions",
    last: str | None = None,
) -> list[Event]:
    """Ids and data of the events of a stream."""
    headers = {} if last is None else {"last-event-id": last}
    found, known = [], ""
    async with client.stream("POST", page, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                known = value
            elif name == "data":
                found.append((known, value))
    return found


def moved(event_id: str, positions: str) -> str:
    """The id of another position in the same stream."""
    _, _, token = event_id.rpartition("-")[0].partition("-")
    return with_checksum(f"{positions}-{token}")


async def follow(
    client: httpx2.AsyncClient, page: str, body: Mapping[str, object], broken: list[str]
) -> AsyncIterator[str]:
    """The data of a stream's events; ``broken`` gets the last event's id at each broken one."""
    last: dict[str, str] = {}
    while True:
        try:
            async with client.stream("POST", page, json=body, headers=last) as response:
                response.raise_for_status()
                broken += last.values()
                async for line in response.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        known = value
                    elif name == "data":
                        last = {"last-event-id": known}
                        yield value
                        if value == "[DONE]":
                            return
        except httpx2.TransportError:
            await asyncio.sleep(0.05)
