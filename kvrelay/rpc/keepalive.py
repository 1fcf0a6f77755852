"""When a connection that fell silent is given up, on either side of it."""

from __future__ import annotations

PING_SECONDS = 60.0
"""For the answer to a ping. It waits behind all that is on its way, megabytes at times, and gRPC
takes nothing else that comes meanwhile for a sign of life: a short time breaks connections that are
only slow."""

SLOWEST = 50_000.0
"""Bytes a second: a way that carries less is taken for silent when much has to go through it."""


def arguments(seconds: float, timeout: float, ping: float) -> list[tuple[str, int]]:
    """A ping after so many ``seconds`` in which nothing came, and ``ping`` for its answer.

    Whose kernel confirms nothing of what was sent to it for ``timeout`` is given up too, on Linux:
    gRPC makes of it TCP's user timeout. A machine or a network that died is noticed by that.
    """
    return [
        ("grpc.keepalive_time_ms", round(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", round(ping * 1000)),
    ]
