"""One HTTP request is one request in the metrics and in the access log, whatever it is made of."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

from router.metrics import registry_of
from tests.router.fakes import Behaviour, Running, decode_worker, model
from tests.router.http.rig import SEED, bounded, door, events, moved, raw
from tests.router.rig import PROMPT, json_log

PAGE = "/v1/completions"
BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 12, "seed": SEED, "stream": True}
OTHERS = [[30 + number, 31, 32, 33, 34] for number in range(3)]
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_generation_tokens",
)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with json_log() as made:
        yield made


def lines_of(log: io.StringIO) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line["logger"] == "kvrelay.access"]


def observed(page: CollectorRegistry) -> list[float]:
    """How often each of the histograms has observed something."""
    labels = {"model_name": model().name}
    found = [page.get_sample_value(f"kvrelay:{name}_count", labels) for name in HISTOGRAMS]
    return [one for one in found if one is not None]


async def ended(router: Running, count: int) -> dict[str, int]:
    """How the requests ended, once so many have."""
    async with asyncio.timeout(20):
        while router.service.ended.total() < count:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    return dict(router.service.ended)


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_resumed_stream(log: io.StringIO, keeps: bool) -> None:
    """What is generated again was counted when the client received it."""
    body = {**BODY, "return_token_ids": True}
    async with door(access_log=True) as (router, client):
        whole = await events(client, body)
        page, totals = registry_of(router.service), router.service.totals
        assert observed(page) == [1, 11, 1, 1]
        if keeps:
            first = [json.loads(data) for _, data in whole[:5]]
            body["output_token_ids"] = [
                token for event in first for token in event["choices"][0]["token_ids"]
            ]
        await events(client, body, last=whole[4][0])
        assert await ended(router, 2) == {"finished": 2}
        assert observed(page) == [1, 11 + 6, 2, 2]
        assert totals.generation_tokens == 12 + 7
        assert totals.first_tokens == 1
        assert totals.prompt_tokens == 2 * len(PROMPT)
    first_line, second = lines_of(log)
    assert second["completion_tokens"] == 7
    assert second["ended"] == "finished"
    assert second["request_id"] == first_line["request_id"]


async def test_a_resumption_that_is_refused() -> None:
    async with door() as (router, client):
        whole = await events(client, BODY)
        last = whole[4][0]
        too_far = moved(last, "13")
        made = await client.post(PAGE, json=BODY, headers={"last-event-id": too_far})
        assert made.status_code == 412
        assert await ended(router, 2) == {"finished": 1, "failed_precondition": 1}
        assert observed(registry_of(router.service)) == [1, 11, 1, 1]
        assert router.service.totals.generation_tokens == 12


async def test_a_client_that_leaves_a_resumed_stream() -> None:
    step = asyncio.Semaphore(100)
    worker = decode_worker(behaviour=Behaviour(step=step))
    body = {**BODY, "max_tokens": 100}

    async def pace() -> None:
        while True:
            step.release()
            await asyncio.sleep(0.02)

    async with door([worker]) as (router, client):
        whole = await events(client, body)
        pacing = asyncio.create_task(pace())
        headers = {"last-event-id": whole[4][0]}
        async with client.stream("POST", PAGE, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    pacing.cancel()  # it cannot become whole before the client has left
                    break
        assert await ended(router, 2) == {"finished": 1, "cancelled": 1}


async def test_several_prompts(log: io.StringIO) -> None:
    prompts = [PROMPT, *OTHERS]
    body = {"prompt": prompts, "max_tokens": 6, "seed": SEED, "n": 2}
    async with door(access_log=True) as (router, client):
        assert (await client.post(PAGE, json=body)).status_code == 200
        assert await ended(router, 1) == {"finished": 1}
        resumed = {**body, "stream": True, "return_token_ids": True}
        whole = await events(client, resumed)
        await events(client, resumed, last=whole[20][0])
        assert await ended(router, 3) == {"finished": 3}
    first, _, last = lines_of(log)
    assert first["prompt_tokens"] == sum(map(len, prompts))
    assert first["completion_tokens"] == 4 * 2 * 6
    received = sum(len(json.loads(data)["choices"][0]["token_ids"]) for _, data in whole[:21])
    assert last["completion_tokens"] == 4 * 2 * 6 - received


async def test_one_prompt_that_fails_ends_the_request_once() -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(5)))
    body = {"prompt": [PROMPT, *OTHERS], "max_tokens": 50, "stream": True}
    async with door([worker], max_failures=0) as (router, client):
        async with client.stream("POST", PAGE, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    await worker.stop()
        assert await ended(router, 1) == {"unavailable": 1}


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size >> 10):
        yield b" " * 1024


async def test_what_http_refuses_is_no_fault_of_the_server() -> None:
    """An alert rings for ``internal``: no client can make it ring."""
    kind = {"content-type": "application/json"}
    async with bounded(body_bytes=200 << 10) as (router, client, _):
        for status, body, headers in (
            (413, b" " * (201 << 10), kind),
            (413, chunks(300 << 10), kind),
            (415, b"{}", {"content-type": "text/plain"}),
            (400, b"{", kind),
        ):
            made = await client.post(PAGE, content=body, headers=headers)
            assert made.status_code == status, made.text
        assert await ended(router, 4) == {"invalid_argument": 4}
    async with bounded(body_seconds=0.3) as (router, client, _):
        for sent in (1, 100 << 10):  # a small body is waited for before it has a place
            reader, writer = await raw(client)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (110 << 10, b" " * sent)
            )
            async with asyncio.timeout(10):
                assert b" 408 " in await reader.readline()
            writer.close()
        assert await ended(router, 2) == {"invalid_argument": 2}
