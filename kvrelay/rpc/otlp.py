"""Spans that are sent to a collector by OTLP over gRPC.

A thread of the SDK sends them in batches. Its queue is bounded (``OTEL_BSP_MAX_QUEUE_SIZE``,
2,048): if the collector is slow or absent, the oldest spans are dropped, and no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from threading import Thread
from types import TracebackType

import grpc
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.errors import KvrelayError
from kvrelay.process import logs
from kvrelay.rpc.status import code_of
from kvrelay.rpc.tracing import NONE, Attributes, Headers, Metadata, Span
from kvrelay.version import VERSION

log = logging.getLogger("kvrelay")
END_SECONDS = 1.0  # for the collector to take the last spans
QUIET = (
    "opentelemetry.exporter",  # warns of every attempt; a failed export is logged as an error
    "opentelemetry.trace",  # its warnings quote invalid headers of clients
)
W3C = TraceContextTextMapPropagator()
CLIENT_FAULTS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class RecordedSpan(Span):
    """``origin``: nanoseconds to add to ``time.monotonic`` to get ``time.time``."""

    def __init__(self, span: otel.Span, tracer: otel.Tracer, origin: int) -> None:
        self._span = span
        self._tracer = tracer
        self._origin = origin
        self.on = span.is_recording()
        self._complete = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self._span.end(self._at(time.monotonic()))

    @property
    def metadata(self) -> Metadata:  # type: ignore[override]
        carrier: dict[str, str] = {}
        W3C.inject(carrier, otel.set_span_in_context(self._span))
        return tuple(carrier.items())

    def child(self, name: str, attributes: Attributes = NONE, *, call: bool = False) -> Span:
        if not self.on:
            return self
        kind = otel.SpanKind.CLIENT if call else otel.SpanKind.INTERNAL
        return self._child(name, time.monotonic(), attributes, kind)

    def record(self, name: str, since: float, until: float, attributes: Attributes = NONE) -> None:
        if self.on:
            self._child(name, since, attributes)._span.end(self._at(max(since, until)))

    def set(self, attributes: Attributes, name: str = "") -> None:
        self._span.set_attributes(attributes)
        if name:
            self._span.update_name(name)

    def fail(self, error: BaseException) -> None:
        """The message is left out: it may quote the request."""
        if self._complete:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("error.type", "cancelled")
            return
        self._span.set_attribute("error.type", type(error).__name__)
        if not isinstance(error, KvrelayError) or code_of(error) not in CLIENT_FAULTS:
            self._span.set_status(otel.StatusCode.ERROR)

    def complete(self) -> None:
        self._complete = True

    def _child(
        self,
        name: str,
        since: float,
        attributes: Attributes,
        kind: otel.SpanKind = otel.SpanKind.INTERNAL,
    ) -> RecordedSpan:
        parent = otel.set_span_in_context(self._span)
        begun = self._at(since)
        made = self._tracer.start_span(name, parent, kind, attributes, start_time=begun)
        return RecordedSpan(made, self._tracer, self._origin)

    def _at(self, moment: float) -> int:
        return self._origin + int(moment * 1e9)


class OtlpTracer:
    """The tracer of one process."""

    def __init__(
        self, service: str, endpoint: str, ratio: float, exporter: SpanExporter | None = None
    ) -> None:
        self._endpoint = endpoint
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint)
        about = {
            "service.namespace": "kvrelay",
            "service.name": f"kvrelay-{service}",
            "service.version": VERSION,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(about),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("kvrelay", VERSION)
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.ERROR)

    def serving(self, name: str, headers: Headers, attributes: Attributes) -> Span:
        """A client's ``traceparent`` decides whether the span is recorded, else the ratio does."""
        carrier: dict[str, list[str]] = {}
        for key, value in headers:
            if key in W3C.fields and isinstance(value, str):
                carrier.setdefault(key, []).append(value)
        now = time.monotonic_ns()
        origin = time.time_ns() - now
        parent = W3C.extract(carrier)
        span = self._tracer.start_span(
            name, parent, otel.SpanKind.SERVER, attributes, start_time=origin + now
        )
        logs.traced(otel.format_trace_id(span.get_span_context().trace_id))
        return RecordedSpan(span, self._tracer, origin)

    def end(self) -> None:
        """Send the last spans; they are lost if the collector does not take them in time."""
        ending = Thread(target=self._provider.shutdown, name="otlp-end", daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            log.warning("the last spans are lost: the collector %s does not answer", self._endpoint)
            self._exporter.shutdown()  # ends the call that is open
