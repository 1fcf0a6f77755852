"""When a connection that fell silent is given up, on either side of it."""

from __future__ import annotations

BULK_PING_SECONDS = 60.0
"""For the answer to a ping where megabytes may be on their way before it; gRPC's own default."""


def arguments(seconds: float, timeout: float) -> list[tuple[str, int]]:
    """A ping after so many ``seconds`` of silence, and ``timeout`` for its answer.

    gRPC waits for that answer as long as the last argument says; without it for a minute, whatever
    stands in the one before.
    """
    answered = round(timeout * 1000)
    return [
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", answered),
        ("grpc.http2.ping_timeout_ms", answered),
    ]
