"""What a client of OpenAI's API gets: answers, streams, usage, errors, cancellation."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from tests.router.fakes import Behaviour, answer, decode_worker, prefill_worker, text_of, tokenizer
from tests.router.http.rig import SEED, door, expected, openai_of
from tests.router.rig import PROMPT

CHAT = [{"role": "user", "content": "Hello"}]


async def test_completion_and_its_stream() -> None:
    workers = [prefill_worker(), decode_worker()]
    async with door(workers, disaggregate="always") as (router, _), openai_of(router) as client:
        whole = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, seed=SEED
        )
        assert whole.choices[0].text == expected(8)
        assert whole.choices[0].finish_reason == "length"
        assert whole.system_fingerprint == "r/float32"
        usage = whole.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 8, 19)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 4

        stream = await client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=8,
            seed=SEED,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(one.choices[0].text for one in chunks[:-1]) == expected(8)
        assert [one.choices[0].finish_reason for one in chunks[:-1]][-1] == "length"
        assert all(one.usage is None for one in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage == usage
        assert len({one.id for one in chunks}) == 1


async def test_chat_fills_the_context_and_streams_a_role_first() -> None:
    workers = [decode_worker(max_model_len=60)]
    async with door(workers) as (router, _), openai_of(router) as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
        ]
        whole = await client.chat.completions.create(model="tiny", messages=messages, seed=SEED)
        assert whole.usage is not None
        assert whole.usage.total_tokens == 61  # the KV of the last token is never stored
        assert whole.choices[0].message.role == "assistant"
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, seed=SEED, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(one.choices[0].delta.content or "" for one in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_line_ends_of_unicode_end_no_event() -> None:
    """httpx takes each of them for the end of a line."""
    said = "a\vb\fc\x1cd\x1de\x1ef\x85g\u2028h\u2029i"
    body = {"prompt": said, "echo": True, "max_tokens": 1, "stream": True}
    async with door() as (_, client):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            events = [line async for line in response.aiter_lines() if line]
        whole = await client.post("/v1/completions", json={**body, "stream": False})
    assert [line for line in events if not line.startswith(("id: ", "data: "))] == []
    chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(said)
    assert whole.json()["choices"][0]["text"].startswith(said)


async def test_events_on_the_wire() -> None:
    async with door() as (_, client):
        body = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED, "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with client.stream(
            "POST",
            "/v1/completions",
            json={**body, "stream_options": options, "return_token_ids": True},
            headers={"x-request-id": "mine-1"},
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"] == "mine-1"
            lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all(chunk["id"] == "cmpl-mine-1" for chunk in chunks)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == PROMPT
    ids = [token for one in chunks[:-1] for token in one["choices"][0]["token_ids"]]
    assert ids == answer(PROMPT, 3, SEED)
    counts = [one["usage"]["completion_tokens"] for one in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "with_ids"),
    [
        ({"user-agent": "Python/3.11 aiohttp/3.14.3", "accept": "*/*"}, False),
        ({"user-agent": "Python/3.11 aiohttp/3.14.3", "accept": "text/event-stream"}, True),
        ({"user-agent": "mine (Python/3.11 aiohttp/3.14.3)"}, True),
        ({}, True),
    ],
)
async def test_load_tools_that_read_data_only_get_no_ids(
    changes: dict[str, str], with_ids: bool
) -> None:
    """``vllm bench serve`` takes each event, less ``data: ``, for JSON."""
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": SEED, "stream": True}
    async with door() as (_, client):
        made = await client.post("/v1/completions", json=body, headers=changes)
    events = made.text.split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("id: ") == with_ids for event in events[:-1])
    data = [event.partition("data: ")[2] for event in events[:-1]]
    text = "".join(json.loads(one)["choices"][0]["text"] for one in data)
    assert text == expected(3)


async def test_stop_strings_and_ids_end_it() -> None:
    tokens = answer(PROMPT, 8, SEED)
    async with door() as (_, client):
        body = {"prompt": PROMPT, "max_tokens": 8, "seed": SEED}
        made = await client.post("/v1/completions", json={**body, "stop_token_ids": tokens[3:4]})
        choice = made.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert made.json()["usage"]["completion_tokens"] == 4
        assert choice["text"] == text_of(tokens[:3])  # as vLLM: not that of the stop token
        text = text_of(tokens)
        stop = text[len(text) // 2 :][:2]
        made = await client.post("/v1/completions", json={**body, "stop": stop})
        assert made.json()["choices"][0]["text"] == text[: text.index(stop)]


async def test_a_trace_gives_the_request_its_id() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with door() as (_, client):
        made = await client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 1},
            headers={"traceparent": trace},
        )
        assert made.headers["traceparent"] == trace
        assert made.headers["x-request-id"] == "0af7651916cd43dd8448eb211c80319c"
        assert made.json()["id"] == "cmpl-0af7651916cd43dd8448eb211c80319c"


async def test_models_health_and_readiness() -> None:
    worker = decode_worker()
    async with door([worker], health_timeout=0.3, unreachable_after=0.3) as (router, client):
        async with openai_of(router) as sdk:
            (model,) = [one async for one in await sdk.models.list()]
            assert model.id == "tiny"
            assert (await sdk.models.retrieve("tiny")).owned_by == "kvrelay"
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.models.retrieve("other/one")
            assert missing.value.code == "model_not_found"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"status": "ready"}
        await worker.stop()
        async with asyncio.timeout(20):
            while (await client.get("/ready")).status_code != 503:
                pass
        assert (await client.get("/health")).status_code == 200


async def test_errors_have_openai_s_shape_and_our_words() -> None:
    async with door() as (router, client):
        async with openai_of(router) as sdk:
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
        assert caught.value.param == "temperature"
        assert caught.value.type == "invalid_request_error"
        assert "temperature: must lie in [0, inf), got -1.0" in str(caught.value)
        made = await client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert made.status_code == 404
        assert made.json()["error"]["code"] == "model_not_found"
        assert made.headers["x-request-id"]
        assert (await client.get("/v1/nothing")).json()["error"]["type"] == "not_found_error"
        assert (await client.get("/v1/completions")).status_code == 405


async def test_paths_and_methods_that_are_not_served_have_ids_too() -> None:
    """A redirection would not: a path with another ending is not found."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with door() as (_, client):
        for method, page, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/completions", 405),
            ("OPTIONS", "/v1/models", 405),
            ("POST", "/v1/completions/", 404),
        ):
            made = await client.request(method, page, headers={"x-request-id": "mine"})
            assert (made.status_code, made.headers["x-request-id"]) == (status, "mine")
            made = await client.request(method, page, headers={"traceparent": trace})
            assert made.headers["x-request-id"] == trace.split("-")[1]
            assert made.headers["traceparent"] == trace
            made = await client.request(method, page, headers={"x-request-id": "x" * 129})
            assert len(made.headers["x-request-id"]) == 32


async def test_a_full_router_says_when_to_ask_again() -> None:
    step = asyncio.Semaphore(0)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker], max_requests=1) as (router, client):
        body = {"prompt": PROMPT, "max_tokens": 2}
        first = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await worker.entered.wait()
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        step.release()
        step.release()
        assert (await first).status_code == 200
        assert router.service.ended == {"finished": 1, "resource_exhausted": 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_the_work(stream: bool) -> None:
    step = asyncio.Semaphore(2)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with door([worker]) as (router, client):
        body = {"prompt": PROMPT, "max_tokens": 50, "stream": stream}
        left = asyncio.ensure_future(_read_all(client, body))
        await worker.entered.wait()
        left.cancel()
        async with asyncio.timeout(20):
            await worker.cancelled.wait()
        async with asyncio.timeout(20):
            while not router.service.ended["cancelled"]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)


async def _read_all(client: httpx2.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_logprobs_in_both_shapes() -> None:
    """The fake workers report none: the fields are asked for and stay null."""
    worker = decode_worker()
    async with door([worker]) as (_, client):
        body = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        body = {"messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 4}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert [leg.sampling.logprobs for leg in worker.legs] == [3, 4]
    assert tokenizer().vocab_size
