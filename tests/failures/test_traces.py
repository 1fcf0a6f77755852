"""Traces of a real cluster: one connected tree a request, with the counts of its usage."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import httpx2
import pytest

from kvrelay.v1 import router_pb2, router_pb2_grpc, types_pb2
from router.service import GENERATE
from tests.exact.oracle import Oracle
from tests.failures.rig import BLOCK, HELD, Rig, rig
from tests.otlp import PARENT, Collector, Seen, collector, traceparent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
COUNTS = (
    *("length", "local", "external", "computed", "recomputed", "generated", "failed", "executed"),
)
SECONDS = 90.0
KILL_AFTER = 40  # tokens


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def traced(model: Path, spans: Collector) -> Iterator[Rig]:
    with rig(model, http=True, otlp=spans.url, module=HELD) as made:
        yield made


def trace_headers(trace: str) -> dict[str, str]:
    return {**traceparent(trace), "tracestate": "other=kept"}


def prompt(length: int) -> list[int]:
    return [secrets.randbelow(256) for _ in range(length)]


def generate(length: int, max_tokens: int) -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(max_tokens=max_tokens)
    message.token_ids.ids.extend(prompt(length))
    message.sampling.CopyFrom(types_pb2.Sampling(temperature=0.0, ignore_eos=True))
    return message


def named(tree: Sequence[Seen], service: str, name: str) -> list[Seen]:
    return [span for span in tree if span.service == f"kvrelay-{service}" and span.name == name]


def only(tree: Sequence[Seen], service: str, name: str) -> Seen:
    (span,) = named(tree, service, name)
    return span


def of_store(span: Seen) -> bool:
    """Whether it is a call to the store, seen by the worker or by the store."""
    return span.service == "kvrelay-store" or span.name.startswith("store ")


def children(tree: Sequence[Seen], parent: Seen, store: bool = False) -> list[str]:
    """Those that are calls to the store, or all others."""
    ours = [span for span in tree if span.parent == parent.id]
    return [span.name for span in ours if of_store(span) == store]


def counts(span: Seen) -> Mapping[str, object]:
    return {name: span.attributes[f"kvrelay.tokens.{name}"] for name in COUNTS}


def check_tree(tree: Sequence[Seen], door: Seen, killed: bool = False) -> None:
    """Every span but the door's has its parent in the tree, and lies in its time.

    A worker that was ``killed`` has not sent its span; its calls to the store have no parent.
    """
    by_id = {span.id: span for span in tree}
    assert len(by_id) == len(tree)
    assert door.parent == PARENT
    for span in tree:
        assert span.end >= span.begin, span
        assert span.state == "other=kept", span
        orphan = killed and of_store(span) and span.parent not in by_id
        if span is not door and not orphan:
            parent = by_id[span.parent]
            assert parent.begin <= span.begin, (parent, span)


def test_a_request_over_http_is_one_trace(traced: Rig, spans: Collector) -> None:
    trace = secrets.token_hex(16)
    body = {"prompt": prompt(100), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    url = f"{traced.cluster.http}/v1/completions"
    answer = httpx2.post(url, json=body, headers=trace_headers(trace), timeout=SECONDS).json()

    def check(tree: Sequence[Seen]) -> None:
        servers = {span.service for span in tree if span.kind == "server"}
        here = {"kvrelay-router", "kvrelay-prefill", "kvrelay-decode", "kvrelay-store"}
        assert servers == here
        door = only(tree, "router", "POST /v1/completions")
        check_tree(tree, door)
        assert door.kind == "server"
        assert door.attributes["http.response.status_code"] == 200
        (request,) = (span for span in tree if span.parent == door.id)
        assert request.name == f"text_completion {traced.model.name}"
        before = ["tokenize", "queue", "placement", "prefill leg"]
        assert children(tree, request) == [*before, "placement", "decode leg"]
        prefill, decode = only(tree, "router", "prefill leg"), only(tree, "router", "decode leg")
        assert children(tree, prefill) == ["prefill"]
        assert children(tree, decode) == ["decode"]
        served = only(tree, "prefill", "prefill")
        assert children(tree, served) == ["queue", "lookup", "compute", "save"]
        decoded = only(tree, "decode", "decode")
        assert set(children(tree, decoded)) == {"queue", "lookup", "load", "compute"}
        assert set(children(tree, served, store=True)) == {"store lookup", "store put"}
        assert {"store lookup", "store get"} <= set(children(tree, decoded, store=True))
        put = next(span for span in tree if span.name == "store put")
        assert children(tree, put, store=True) == ["PutSmall"]
        asked, found = named(tree, "store", "Lookup")
        assert asked.attributes["kvrelay.blocks.found"] == 0
        assert found.attributes["kvrelay.blocks.found"] == -(100 // -BLOCK)
        lookup = only(tree, "decode", "lookup")
        assert lookup.begin <= found.begin <= found.end <= lookup.end
        usage = answer["usage"]
        assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 100
        assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 20
        assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
        assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert request.attributes["gen_ai.request.max_tokens"] == 20
        assert request.attributes["gen_ai.response.id"] == trace
        assert only(tree, "prefill", "compute").attributes["kvrelay.tokens.computed"] == 100
        load = only(tree, "decode", "load").attributes
        assert (
            load["kvrelay.tokens.external"] == decode.attributes["kvrelay.tokens.external"] == 100
        )
        saved = only(tree, "prefill", "save").attributes["kvrelay.tokens.saved"]
        assert saved == prefill.attributes["kvrelay.tokens.saved"] == 100
        assert not any("error.type" in span.attributes for span in tree)

    spans.of(trace, check)


async def over_grpc(
    address: str, message: router_pb2.GenerateRequest, trace: str, kill: Rig | None = None
) -> tuple[list[int], types_pb2.Usage]:
    """Tokens and usage; with ``kill``, the decode workers are killed in the middle."""
    tokens: list[int] = []
    if kill is not None:
        kill.gate.close()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        headers = tuple(trace_headers(trace).items())
        async for response in stub.Generate(message, timeout=SECONDS, metadata=headers):
            tokens += [token.id for token in response.tokens]
            if kill is not None and len(tokens) >= KILL_AFTER:
                for index in range(2):
                    kill.cluster.kill("decode", index)
                kill.gate.open()
                kill = None
    return tokens, response.usage


def test_a_stream_whose_workers_were_killed_shows_every_leg(traced: Rig, spans: Collector) -> None:
    message = generate(60, 300)
    router = traced.cluster.router
    undisturbed, _ = asyncio.run(over_grpc(router, message, secrets.token_hex(16)))
    trace = secrets.token_hex(16)
    tokens, usage = asyncio.run(over_grpc(router, message, trace, traced))
    traced.settle()
    assert tokens == undisturbed

    def legs_of(tree: Sequence[Seen]) -> list[Seen]:
        return [span for span in tree if span.kind == "client" and not of_store(span)]

    def check(tree: Sequence[Seen]) -> None:
        door = only(tree, "router", GENERATE)
        check_tree(tree, door, killed=True)
        (request,) = (span for span in tree if span.parent == door.id)
        legs = legs_of(tree)
        assert all(leg.parent == request.id for leg in legs)
        assert len(legs) == len(usage.legs) >= 3
        for leg, account in zip(legs, usage.legs, strict=True):
            role = types_pb2.Role.Name(account.role).removeprefix("ROLE_").lower()
            assert leg.name == f"{role} leg"
            place = f"{leg.attributes['server.address']}:{leg.attributes['server.port']}"
            assert place == account.address
            assert leg.attributes["kvrelay.leg.lost"] == leg.failed == account.lost
            assert leg.attributes["kvrelay.tokens.generated"] == account.generated
            if not account.lost:
                assert counts(leg) == {name: getattr(account, name) for name in COUNTS}
                assert children(tree, leg) == [role]
        assert any(leg.failed for leg in legs)
        assert sum(account.generated for account in usage.legs) == 300
        assert request.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens == 300
        assert request.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens == 60
        assert not request.failed

    spans.of(trace, check)


def test_a_client_that_leaves_shows_how_far_the_legs_came(traced: Rig, spans: Collector) -> None:
    trace = secrets.token_hex(16)
    traced.gate.close()

    async def leave() -> int:
        tokens = 0
        async with grpc.aio.insecure_channel(traced.cluster.router) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            headers = tuple(trace_headers(trace).items())
            call = stub.Generate(generate(60, 900), timeout=SECONDS, metadata=headers)
            async for response in call:
                tokens += len(response.tokens)
                if tokens >= KILL_AFTER:
                    call.cancel()
                    break
        return tokens

    tokens = asyncio.run(leave())

    def check(tree: Sequence[Seen]) -> None:
        check_tree(tree, only(tree, "router", GENERATE))
        leg, decoded = only(tree, "router", "decode leg"), only(tree, "decode", "decode")
        for span in (leg, decoded):
            assert span.attributes["error.type"] == "cancelled"
            assert not span.failed
        assert set(children(tree, decoded)) == {"queue", "lookup", "load", "compute"}
        compute = only(tree, "decode", "compute")
        generated = int(str(compute.attributes["kvrelay.tokens.generated"]))
        assert tokens - 1 <= generated < 899  # the first token is that of the prefill leg
        assert only(tree, "decode", "load").attributes["kvrelay.tokens.external"] == 60
        assert "error.type" not in only(tree, "prefill", "prefill").attributes

    spans.of(trace, check)
    traced.gate.open()


@pytest.mark.parametrize("hangs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_collector_that_takes_nothing_disturbs_nothing(
    model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """It hangs, or it is absent. Queues overflow; the processes end in order all the same."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(10 * SECONDS))
    with collector() as made:
        made.taking.clear()
        url = made.url if hangs else "http://127.0.0.1:9"
        with rig(model, prefill=1, decode=1, otlp=url) as stand:
            for length in range(20, 40):
                message = generate(length, 8)
                tokens, _ = asyncio.run(
                    over_grpc(stand.cluster.router, message, secrets.token_hex(16))
                )
                assert tokens == oracle.greedy(message.token_ids.ids, 8)
        assert made.asked.is_set() == hangs
        assert not made.seen
    said = "\n".join(stand.lines)
    assert "killed" not in said
    assert "Traceback" not in said
    assert said.count("the last spans are lost") == 4
