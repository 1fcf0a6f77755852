"""OpenTelemetry spans of requests. Off until a process calls ``install`` with an endpoint.

While it is off every span is ``OFF``, whose methods do nothing. Moments are of ``time.monotonic``.
``kvrelay.rpc.otlp`` makes the spans that are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


OFF = Span()


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


def end() -> None:
    """Send the last spans, within a bounded time, and make no more."""
    global _tracer
    tracer = _tracer
    _tracer = None
    if tracer is not None:
        tracer.end()


class _Call(Protocol):
    def invocation_metadata(self) -> object: ...


def headers_of(call: _Call) -> Headers:
    """The metadata of a gRPC call that this process serves; empty if it makes no spans."""
    return cast("Headers", call.invocation_metadata()) if _tracer is not None else ()


def serving(name: str, headers: Headers, attributes: Attributes = NONE) -> Span:
    """Begin the span of a request that this task serves, as a child of the span in ``headers``."""
    return OFF if _tracer is None else _tracer.serving(name, headers, attributes)
