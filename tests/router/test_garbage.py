"""What a request needed is freed when it ends, however it ends: nothing waits for a collection.

An error keeps the frames that it passed, and a message of megabytes in them, for as long as one of
these frames keeps the error.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import httpx2
import pytest

from kvrelay.v1 import router_pb2
from tests.router.fakes import Running
from tests.router.http.rig import door
from tests.router.rig import PROMPT, request, until

BODIES: dict[str, tuple[int, dict[str, object]]] = {
    "answered": (200, {"prompt": PROMPT, "max_tokens": 2}),
    "two prompts": (200, {"prompt": [PROMPT, PROMPT], "max_tokens": 2}),
    "wrong field": (400, {"prompt": PROMPT, "top_p": 7}),
    "one of two prompts too long": (400, {"prompt": [PROMPT, [1] * 9000]}),
    "another model": (404, {"prompt": PROMPT, "model": "another"}),
    "long text": (400, {"prompt": "word " * 500_000}),
}


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
        found += [one for one in gc.garbage if isinstance(one, router_pb2.GenerateRequest)]
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
