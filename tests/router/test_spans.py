"""Spans of both doors of a router in front of fake workers."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from collections.abc import Iterator, Sequence

import pytest

from kvrelay.rpc import tracing
from kvrelay.rpc.tracing import TracingOptions
from kvrelay.v1 import router_pb2
from router.service import GENERATE
from tests.otlp import Collector, Seen, collector
from tests.router.fakes import Behaviour, decode_worker
from tests.router.http.rig import door
from tests.router.rig import PROMPT, failing, json_log, request

PAGE = "/v1/completions"
DOOR = f"POST {PAGE}"


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as made:
        tracing.install(TracingOptions(otlp_endpoint=made.url), "router")
        yield made
        tracing.end()


def sent(spans: Collector) -> Sequence[Seen]:
    """All spans, by their begin."""
    tracing.end()
    return sorted(spans.seen, key=lambda span: span.begin)


def below(every: Sequence[Seen], parent: Seen) -> list[Seen]:
    return [span for span in every if span.parent == parent.id]


async def test_prompts_and_samples_are_one_trace(spans: Collector) -> None:
    async with door() as (_, client):
        body = {"prompt": [PROMPT, PROMPT[1:]], "n": 2, "max_tokens": 3, "seed": 1}
        made = await client.post(PAGE, json=body)
    usage = made.json()["usage"]
    every = sent(spans)
    (root,) = (span for span in every if not span.parent)
    assert root.name == DOOR
    requests = below(every, root)
    assert [one.name for one in requests] == ["text_completion tiny"] * 2
    inputs = [one.attributes["gen_ai.usage.input_tokens"] for one in requests]
    outputs = [int(str(one.attributes["gen_ai.usage.output_tokens"])) for one in requests]
    assert sorted(map(int, map(str, inputs))) == [len(PROMPT) - 1, len(PROMPT)]
    assert sum(outputs) == usage["completion_tokens"] == 12
    for one in requests:
        assert one.attributes["gen_ai.request.choice.count"] == 2
        assert one.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
        names = [span.name for span in below(every, one)]
        assert names.count("queue") == names.count("placement") == names.count("decode leg") == 2
    assert len({span.trace for span in every}) == 1


async def test_a_chat_says_what_was_asked(spans: Collector) -> None:
    async with door() as (_, client):
        body = {
            "messages": [{"role": "user", "content": "the code is swordfish"}],
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
        }
        made = await client.post("/v1/chat/completions", json=body)
        assert made.status_code == 200, made.text
    (chat,) = (span for span in sent(spans) if span.name == "chat tiny")
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.temperature"] == 0.5
    assert chat.attributes["gen_ai.request.top_p"] == 0.9
    assert not [span for span in spans.seen if "swordfish" in repr(span)]


async def test_refused_requests(spans: Collector) -> None:
    async with door() as (router, client):
        made = await client.post(PAGE, json={"prompt": PROMPT, "max_tokens": -1})
        assert made.status_code == 400
        await failing(router.generate(request(100_000)))
    ends = {span.name: span for span in sent(spans) if not span.parent}
    assert ends[DOOR].attributes["http.response.status_code"] == 400
    grpc_door = ends[GENERATE]
    for span in (ends[DOOR], grpc_door):
        assert span.attributes["error.type"] == "Rejected"
        assert not span.failed


async def test_a_client_that_leaves(spans: Collector) -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(2)))
    async with door([worker]) as (router, _):
        call = router.call(request(300))
        tokens = 0
        while tokens < 2:
            response = await call.read()
            assert isinstance(response, router_pb2.GenerateResponse)
            tokens += len(response.tokens)
        call.cancel()
        await asyncio.to_thread(spans.wait, 6)  # tokenize, queue, placement, leg, request, door
    by_name = {span.name: span for span in sent(spans)}
    for name in (GENERATE, "text_completion tiny", "decode leg"):
        assert by_name[name].attributes["error.type"] == "cancelled"
        assert not by_name[name].failed
    leg = by_name["decode leg"].attributes
    assert leg["kvrelay.leg.lost"]
    assert leg["kvrelay.tokens.generated"] == 2


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    with json_log() as made:
        yield made


async def test_lines_about_a_request_have_its_trace(spans: Collector, lines: io.StringIO) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01", "x-request-id": "mine"}
    async with door(access_log=True) as (router, client):
        await client.post(PAGE, json={"prompt": PROMPT, "max_tokens": 1}, headers=headers)
        await router.generate(request(1))
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert (first["request_id"], first["trace_id"]) == ("mine", trace)
    (root,) = (span for span in sent(spans) if not span.parent)
    assert second["trace_id"] == root.trace != trace
