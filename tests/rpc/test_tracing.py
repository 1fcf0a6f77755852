"""Spans of one process: whose children they are, which are sent, and what happens at the end.

A span is that of a task, so the tests are tasks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest

from kvrelay import installation
from kvrelay.errors import NotInstalled, Rejected, Unavailable
from kvrelay.rpc import tracing
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.renewed import RenewedChannel
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import Credentials
from kvrelay.rpc.security.policy import Security
from kvrelay.rpc.tracing import OFF, TracingOptions
from tests.otlp import PARENT, Collector, Seen, collector, traceparent


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as made:
        yield made
        tracing.end()


def begin(spans: Collector, ratio: float = 1.0) -> str:
    """Send spans to the collector; the id of a trace."""
    tracing.install(TracingOptions(otlp_endpoint=spans.url, trace_ratio=ratio), "test")
    return secrets.token_hex(16)


def sent(spans: Collector) -> dict[str, Seen]:
    """All spans by name, after the end."""
    tracing.end()
    return {span.name: span for span in spans.seen}


async def test_without_an_endpoint_every_span_is_off() -> None:
    tracing.install(TracingOptions(), "test")
    with tracing.serving("door", traceparent(secrets.token_hex(16)).items()) as door:
        assert door is OFF
        assert door.child("inside") is OFF
        assert not door.on
        assert door.metadata == ()
    tracing.end()


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "grpc://h:4317", "http://", "http://h:99999"])
def test_an_endpoint_that_is_no_url(url: str) -> None:
    with pytest.raises(Rejected, match=f"otlp_endpoint: must be like .*, got '{url}'"):
        tracing.install(TracingOptions(otlp_endpoint=url), "test")


def test_missing_packages_are_named_with_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installation._found
    absent = "opentelemetry"
    monkeypatch.setattr(
        installation, "_found", lambda name: not name.startswith(absent) and found(name)
    )
    wanted = r"opentelemetry-exporter-otlp-proto-grpc, opentelemetry-sdk are not installed: .*otel"
    with pytest.raises(NotInstalled, match=wanted):
        tracing.install(TracingOptions(otlp_endpoint="http://127.0.0.1:9"), "test")


async def test_a_span_is_the_child_of_the_one_in_the_headers(spans: Collector) -> None:
    trace = begin(spans)
    since = time.monotonic()
    with tracing.serving("door", traceparent(trace).items(), {"a": 1}) as door:
        with door.child("call", call=True) as call:
            ((name, value),) = call.metadata
        door.record("before", since, since + 0.5, {"b": "c"})
    seen = sent(spans)
    assert {span.trace for span in seen.values()} == {trace}
    assert {span.service for span in seen.values()} == {"kvrelay-test"}
    assert seen["door"].parent == PARENT
    assert seen["door"].attributes == {"a": 1}
    assert seen["call"].parent == seen["before"].parent == seen["door"].id
    assert [seen[name].kind for name in seen] == ["client", "internal", "server"]
    assert (name, value) == ("traceparent", f"00-{trace}-{seen['call'].id}-01")
    assert abs(seen["before"].end - seen["before"].begin - 500_000_000) <= 1000
    assert seen["before"].begin <= seen["door"].begin <= seen["call"].begin


@pytest.mark.parametrize("header", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 9000])
async def test_a_bad_header_begins_a_trace(spans: Collector, header: str) -> None:
    begin(spans)
    with tracing.serving("door", [("traceparent", header)]):
        pass
    assert not sent(spans)["door"].parent


@pytest.mark.parametrize("state", ["a=" + "b" * 600, "no member", "a=b,a=b", "ключ=1"])
async def test_a_bad_state_goes_no_further(spans: Collector, state: str) -> None:
    """Longer metadata than a worker takes would fail every leg of the request."""
    trace = begin(spans)
    headers = [*traceparent(trace).items(), ("tracestate", state)]
    with tracing.serving("door", headers) as door:
        assert [name for name, _ in door.metadata] == ["traceparent"]
    assert sent(spans)["door"].parent == PARENT


async def test_lines_of_a_state_are_joined(spans: Collector) -> None:
    trace = begin(spans)
    headers = [*traceparent(trace).items(), ("tracestate", "a=1"), ("tracestate", "b=2")]
    with tracing.serving("door", headers) as door:
        assert dict(door.metadata)["tracestate"] == "a=1,b=2"


async def test_the_client_decides_before_the_ratio_does(spans: Collector) -> None:
    trace = begin(spans, ratio=0.0)
    with tracing.serving("unwanted", traceparent(trace, "00").items()) as door:
        assert not door.on
        ((_, value),) = door.child("inside").metadata
        assert value.startswith(f"00-{trace}-")
        assert value.endswith("-00")
    with tracing.serving("not chosen", ()):
        pass
    with tracing.serving("wanted", traceparent(trace).items()):
        pass
    assert list(sent(spans)) == ["wanted"]


@pytest.mark.parametrize(
    ("error", "kind", "failed"),
    [
        (Unavailable("gone"), "Unavailable", True),
        (Rejected("n", "secret"), "Rejected", False),
        (ZeroDivisionError(), "ZeroDivisionError", True),
        (asyncio.CancelledError(), "cancelled", False),
    ],
)
async def test_how_a_span_ends(
    spans: Collector, error: BaseException, kind: str, failed: bool
) -> None:
    begin(spans)
    with pytest.raises(type(error)), tracing.serving("door", ()):
        raise error
    seen = sent(spans)["door"]
    assert seen.attributes == {"error.type": kind}
    assert seen.failed == failed


async def test_a_collector_that_hangs_holds_nothing_up(
    spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue drops what does not fit, and the end waits for no answer."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    begin(spans)
    spans.taking.clear()
    for _ in range(8):
        with tracing.serving("first", ()):
            pass
    assert spans.asked.wait(60)
    for _ in range(1000):
        with tracing.serving("later", ()):
            pass
    tracing.end()  # within the time limit of this test
    assert not spans.seen
    assert tracing.serving("after", ()) is OFF


class _Echo(grpc.GenericRpcHandler):
    """Answers with the metadata of the call that are ours."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        ours = [pair for pair in call.invocation_metadata if pair[0] in ("authorization", "a", "b")]

        async def answer(request: bytes, context: object) -> bytes:
            return repr([tuple(pair) for pair in ours]).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize("renewed", [False, True])
async def test_metadata_of_a_call_goes_beside_the_token(
    token: str | None, renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    security = Security(credentials=Credentials(token=token))
    monkeypatch.setattr(policy, "_installed", security)
    try:
        options = ChannelOptions(security=security)
        made = (
            RenewedChannel(address, lambda _: grpc.aio.insecure_channel(address))
            if renewed
            else open_channel(address, options)
        )
        async with made as channel:
            call: Callable[..., Awaitable[bytes]] = channel.unary_unary("/test/Echo")
            own = [("authorization", "Bearer sesame")] if token else []
            assert await call(b"") == repr(own).encode()
            more = [("a", "1"), ("b", "2")]
            assert await call(b"", metadata=tuple(more)) == repr([*own, *more]).encode()
    finally:
        await server.stop(None)
