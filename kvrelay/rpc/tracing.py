"""OpenTelemetry spans of requests. Off until a process calls ``install`` with an endpoint.

While it is off every span is ``OFF``, whose methods do nothing. Moments are of ``time.monotonic``.
``kvrelay.rpc.otlp`` makes the spans that are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, cast
from urllib.parse import urlsplit

from kvrelay.config.option import option
from kvrelay.errors import Rejected
from kvrelay.installation import require
from kvrelay.rpc.security.options import SecurityOptions

if TYPE_CHECKING:
    from kvrelay.rpc.otlp import OtlpTracer

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]
Headers: TypeAlias = Iterable[tuple[str, str | bytes]]
Metadata: TypeAlias = tuple[tuple[str, str], ...]
GROUP = "tracing"
NONE: Attributes = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions(SecurityOptions):
    """Flags, environment and file of a process that makes spans."""

    otlp_endpoint: str | None = option(
        None,
        "send OpenTelemetry spans of requests to this collector, by OTLP over gRPC, such as"
        " http://127.0.0.1:4317, or https:// for TLS; default: no spans",
        metavar="URL",
        group=GROUP,
    )
    trace_ratio: float = option(
        1.0,
        "part of the requests that are traced; a client's traceparent header decides for its own",
        low=0.0,
        high=1.0,
        group=GROUP,
    )


class Span:
    """A span that is not recorded. As a context manager, it ends with the block.

    ``on``: whether it is recorded. ``metadata``: sent with a gRPC call, it makes the server's span
    a child of this one.
    """

    on = False
    metadata: Metadata = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def child(self, name: str, attributes: Attributes = NONE, *, call: bool = False) -> Span:
        """A child that begins now; ``call``: it is a call to another process."""
        return self

    def record(self, name: str, since: float, until: float, attributes: Attributes = NONE) -> None:
        """Add a child that has ended; ``since`` and ``until`` are of ``time.monotonic``."""

    def set(self, attributes: Attributes, name: str = "") -> None:
        """Add attributes, and rename the span if there is a ``name``."""

    def fail(self, error: BaseException) -> None:
        """Record the error that ends it."""

    def complete(self) -> None:
        """Its work is done: an error from now on is none of its own."""


OFF = Span()
_current: ContextVar[Span] = ContextVar("kvrelay.span", default=OFF)


def current() -> Span:
    """The span that this task or thread works for."""
    return _current.get()


@contextmanager
def under(span: Span) -> Iterator[None]:
    """What the caller does inside, and jobs that it queues, belong to ``span``."""
    before = _current.set(span)
    try:
        yield
    finally:
        _current.reset(before)


_tracer: OtlpTracer | None = None


def check(options: TracingOptions) -> None:
    """Raise ``Rejected`` or ``NotInstalled`` if there is an endpoint and it cannot be used."""
    if options.otlp_endpoint is None:
        return
    try:
        url = urlsplit(options.otlp_endpoint)
        valid = url.scheme in ("http", "https") and url.hostname and (url.port or 1)
    except ValueError:
        valid = False
    if not valid:
        raise Rejected(
            "otlp_endpoint",
            f"must be like http://HOST:4317 or https://HOST:4317, got {options.otlp_endpoint!r}",
        )
    require("otel")


def install(options: TracingOptions, service: str) -> None:
    """Trace this process from now on, if there is an endpoint; raises as ``check`` does."""
    global _tracer
    check(options)
    if options.otlp_endpoint is not None:
        from kvrelay.rpc.otlp import OtlpTracer

        _tracer = OtlpTracer(service, options.otlp_endpoint, options.trace_ratio)


def installed() -> bool:
    """Whether this process makes spans."""
    return _tracer is not None


def end() -> None:
    """Send the last spans, within a bounded time, and make no more."""
    global _tracer
    tracer = _tracer
    _tracer = None
    if tracer is not None:
        tracer.end()


class Call(Protocol):
    """A gRPC call that this process serves."""

    def invocation_metadata(self) -> object: ...


def headers_of(call: Call) -> Headers:
    """The metadata of a call; empty if this process makes no spans."""
    return cast("Headers", call.invocation_metadata()) if _tracer is not None else ()


def serving(name: str, headers: Headers, attributes: Attributes = NONE) -> Span:
    """Begin the span of a request that this task serves, as a child of the span in ``headers``."""
    return OFF if _tracer is None else _tracer.serving(name, headers, attributes)


def joining(name: str, call: Call) -> Span:
    """Begin the span of a call that is part of a trace; a call without ``traceparent`` has none."""
    headers = tuple(headers_of(call))
    traced = any(key == "traceparent" for key, _ in headers)
    return serving(name, headers) if traced else OFF
