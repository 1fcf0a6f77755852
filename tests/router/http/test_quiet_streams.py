"""A stream without events: its head comes early, and comments keep its connection open."""

from __future__ import annotations

import asyncio
import itertools
import json

import openai
import pytest

from kvrelay.errors import Rejected
from router.http import exchange
from tests.router.fakes import Behaviour, Running, answer, decode_worker, namespace
from tests.router.http.rig import SEED, door, events, expected, moved, openai_of
from tests.router.http.test_resume import tokens_of
from tests.router.rig import PROMPT

PAGE = "/v1/completions"
BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED, "stream": True}


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments come all the time."""
    monkeypatch.setattr(exchange, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(exchange, "EARLY_SECONDS", 0.01)


@pytest.mark.parametrize("waits", ["for a slot", "for its first token"])
async def test_the_head_comes_before_the_first_token(waits: str) -> None:
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step), max_num_seqs=1)
    async with door([worker]) as (router, client):
        first = [asyncio.ensure_future(events(client, BODY)) for _ in range(2)]
        if waits == "for a slot":
            async with asyncio.timeout(10):
                while not router.service.queue_status().running:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
        else:
            for one in first:
                one.cancel()
        async with client.stream("POST", PAGE, json=BODY) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            assert await anext(lines) == ": queued"
            for _ in range(9):
                step.release()
            data = [line async for line in lines if line.startswith("data: ")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in data[:-1]]
        assert "".join(one["choices"][0]["text"] for one in chunks) == expected(3)
        await asyncio.gather(*first, return_exceptions=True)


@pytest.mark.usefixtures("restless")
async def test_openai_s_client_ignores_comments_at_any_place() -> None:
    """After an id, an empty line would make it an event without data, which it cannot read."""
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step))

    async def pace() -> None:
        for _ in range(3):
            await asyncio.sleep(0.12)  # more than a comment waits
            step.release()

    async with door([worker]) as (router, plain), openai_of(router) as sdk:
        lines: list[str] = []
        async with plain.stream("POST", PAGE, json=BODY) as response:
            async for line in response.aiter_lines():
                if line.startswith(":") and lines[-1:] != [line]:
                    step.release()  # each token comes after a comment
                lines.append(line)
        stream = await sdk.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3, seed=SEED, stream=True
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(pace())
            chunks = [chunk async for chunk in stream]
        assert lines[0] == ": queued"
        assert lines.count(": working") >= 2
        for comment, after in itertools.pairwise(lines):
            assert not comment.startswith(":") or after, "an empty line after a comment"
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected(3)


@pytest.mark.usefixtures("restless")
async def test_a_program_that_reads_no_ids_gets_the_head_and_no_comments() -> None:
    """``vllm bench serve`` strips each piece that it reads: a comment would swallow the events."""
    gate = asyncio.Event()
    async with door([decode_worker(behaviour=Behaviour(tokens=gate))]) as (_, client):
        agent = {"user-agent": "Python/3.13 aiohttp/3.14.0"}
        async with client.stream("POST", PAGE, json=BODY, headers=agent) as response:
            assert response.status_code == 200
            gate.set()
            lines = [line async for line in response.aiter_lines()]
    assert lines[-2] == "data: [DONE]"
    assert all(line.startswith("data: ") or not line for line in lines)


@pytest.mark.usefixtures("restless")
async def test_comments_change_no_event() -> None:
    body = {**BODY, "max_tokens": 40, "return_token_ids": True}
    async with door([decode_worker(behaviour=Behaviour())]) as (_, client):
        whole = await events(client, body)
    assert tokens_of(whole) == answer(PROMPT, 40, SEED)


def waiting_of(router: Running) -> tuple[int, int]:
    """Requests that run, and that wait."""
    status = router.service.queue_status()
    return status.running, status.waiting


async def test_errors_before_the_head_have_their_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "EARLY_SECONDS", 60.0)  # no machine is too slow for it
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step), max_num_seqs=1)
    async with door([worker], max_requests=2, worker_wait=0.1) as (router, client):
        wrong = await client.post(PAGE, json={**BODY, "temperature": -1})
        assert wrong.status_code == 400
        opened = [asyncio.ensure_future(events(client, BODY)) for _ in range(2)]
        async with asyncio.timeout(10):
            while sum(waiting_of(router)) < 2:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        full = await client.post(PAGE, json=BODY)
        assert full.status_code == 429
        for _ in range(9):
            step.release()
        await asyncio.gather(*opened)
        worker.behaviour.fail = Rejected("leg.sampling.top_k", "not today")
        late = await client.post(PAGE, json=BODY)
        assert late.status_code == 400
        assert late.json()["error"]["param"] == "top_k"
        await worker.stop()
        async with asyncio.timeout(10):
            while router.service.registry.usable(worker.role):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        none = await client.post(PAGE, json=BODY)
        assert none.status_code == 503


async def test_errors_after_the_head_are_events_that_the_sdk_raises() -> None:
    gate = asyncio.Event()
    worker = decode_worker(behaviour=Behaviour(tokens=gate))
    async with door([worker], max_failures=0) as (_, client):
        async with client.stream("POST", PAGE, json=BODY) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": queued"
            await worker.stop()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[0].removeprefix("data: "))["error"]["type"] == "server_error"
    other = decode_worker(behaviour=Behaviour(tokens=asyncio.Event()))
    async with door([other], max_failures=0) as (router, _), openai_of(router) as sdk:
        stream = await sdk.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3, stream=True
        )
        await other.stop()
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_resumed_stream_waits_with_its_head_for_a_refusal() -> None:
    """Whether the answer reaches the client's position is known after its tokens were made."""
    async with door() as (_, client):
        whole = await events(client, BODY)
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker]) as (_, client):
        header = {"last-event-id": moved(whole[-2][0], "9")}
        refused = asyncio.ensure_future(client.post(PAGE, json=BODY, headers=header))
        await asyncio.sleep(3 * exchange.EARLY_SECONDS)
        for _ in range(3):
            step.release()
        assert (await refused).status_code == 412
    other = decode_worker(namespace=namespace(revision="other"))
    async with door([other], worker_wait=0.1) as (_, client):
        header = {"last-event-id": whole[0][0]}
        refused_now = await client.post(PAGE, json=BODY, headers=header)
        assert refused_now.status_code == 412


async def test_a_refused_stream_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accepted and refused in one step of the event loop: its stream must not begin then."""
    looks: list[int] = []
    usual = exchange.Exchange._look

    def look(one: exchange.Exchange) -> None:
        looks.append(one.status)
        usual(one)

    monkeypatch.setattr(exchange.Exchange, "_look", look)
    made = answer(PROMPT, 12, SEED)
    stops = {**BODY, "max_tokens": 12, "seed": SEED, "stop_token_ids": made[2:3]}
    async with door() as (_, client):
        whole = await events(client, stops)
        header = {"last-event-id": moved(whole[0][0], "5")}
        looks.clear()
        kept = {**stops, "output_token_ids": made[:5]}
        refused = await client.post(PAGE, json=kept, headers=header)
        assert refused.status_code == 400
        assert "ended before" in refused.json()["error"]["message"]
        await asyncio.sleep(3 * exchange.EARLY_SECONDS)
        assert not looks
