"""An OpenTelemetry collector: it keeps the spans that it gets by OTLP, over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
WAIT_SECONDS = 60.0
SOON = "50"  # milliseconds after which a process sends its spans
KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}
PARENT = "00f067aa0ba902b7"
"""The id of a client's span, in ``traceparent``."""

Value = str | bool | int | float | list[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """A span as the collector got it; ids are hexadecimal, times in nanoseconds."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    begin: int
    end: int
    attributes: Mapping[str, Value]
    failed: bool


class Collector:
    """Listens at ``url``. While ``taking`` is cleared no call is answered."""

    def __init__(self) -> None:
        self.taking = threading.Event()
        self.taking.set()
        self.asked = threading.Event()  # it has got a call
        self.url = ""
        self._seen: list[Seen] = []
        self._news = threading.Condition()

    def export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """The call of the protocol."""
        self.asked.set()
        self.taking.wait(WAIT_SECONDS)
        with self._news:
            self._seen += _spans(request)
            self._news.notify_all()
        return ExportTraceServiceResponse()

    @property
    def seen(self) -> Sequence[Seen]:
        """All spans so far."""
        with self._news:
            return tuple(self._seen)

    def wait(self, count: int) -> None:
        """Until it has so many spans."""
        with self._news:
            assert self._news.wait_for(lambda: len(self._seen) >= count, WAIT_SECONDS), self._seen

    def of(self, trace: str, check: Callable[[Sequence[Seen]], None]) -> None:
        """Checks the spans of a trace, by their begin. Those that fail may not have come yet."""

        def found() -> list[Seen]:
            ours = [span for span in self._seen if span.trace == trace]
            return sorted(ours, key=lambda span: span.begin)

        def passes() -> bool:
            with suppress(AssertionError, LookupError, ValueError):
                check(found())
                return True
            return False

        with self._news:
            if not self._news.wait_for(passes, WAIT_SECONDS):
                check(found())


def traceparent(trace: str, flags: str = "01") -> dict[str, str]:
    """The header of a client that traces; ``flags`` 00: and does not record."""
    return {"traceparent": f"00-{trace}-{PARENT}-{flags}"}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector; processes that begin inside send their spans soon."""
    made = Collector()
    server = grpc.server(ThreadPoolExecutor(8))
    method = grpc.unary_unary_rpc_method_handler(
        made.export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Export": method})
    server.add_generic_rpc_handlers((handler,))
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", SOON)
        yield made
    made.taking.set()
    server.stop(0).wait()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        service = str(_values(resource.resource.attributes)["service.name"])
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=service,
                    name=span.name,
                    kind=KINDS[span.kind],
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    state=span.trace_state,
                    begin=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                )


def _values(attributes: Sequence[KeyValue]) -> dict[str, Value]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Value:
    if value.WhichOneof("value") == "array_value":
        return [item.string_value for item in value.array_value.values]
    found: Value = getattr(value, value.WhichOneof("value") or "string_value")
    return found
