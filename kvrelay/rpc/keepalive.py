"""When a silent connection is closed, on either side."""

from __future__ import annotations

PING_SECONDS = 60.0
"""For the answer to a ping, which queues behind all data in flight, megabytes at times. gRPC counts
nothing else as a sign of life, so a short time breaks connections that are only slow."""

MIN_BYTES_PER_SECOND = 50_000.0
"""A connection that carries less counts as silent while much data has to pass through it."""


def arguments(seconds: float, timeout: float, ping: float) -> list[tuple[str, int]]:
    """A ping after ``seconds`` without data, and ``ping`` seconds for its answer.

    On Linux gRPC also sets TCP's user timeout to ``timeout``: a connection whose peer acknowledges
    no byte for so long is closed. That detects a dead machine or network.
    """
    return [
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(ping * 1000)),
    ]
