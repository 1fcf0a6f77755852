"""The spans of a leg that was dropped, by how far it had come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from kvrelay.engine.core.updates import Ended, Timing
from kvrelay.engine.core.usage import LegTokens
from kvrelay.rpc import tracing
from kvrelay.rpc.protocol import Role
from kvrelay.rpc.tracing import TracingOptions
from kvrelay.v1 import types_pb2
from kvrelay.worker.spans import LegSpans
from tests.otlp import Seen, collector

DECODE, PREFILL = types_pb2.ROLE_DECODE, types_pb2.ROLE_PREFILL
TOKENS = LegTokens(
    length=9,
    local=0,
    external=4,
    computed=3,
    generated=2,
    recomputed=0,
    executed=3,
    failed=0,
    runs=(),
)


async def drop(role: Role, queue: int, load: int, run: int, rest: int) -> Sequence[Seen]:
    """The children of the leg's span; the phases last so many seconds."""
    with collector() as made:
        tracing.install(TracingOptions(otlp_endpoint=made.url), "test")
        try:
            with tracing.serving("leg", ()) as span:
                now = time.monotonic()
                begun = now - queue - load - run - rest
                timing = Timing(queue, load, run, begun, (begun, begun + queue))
                LegSpans(span, role).dropped(Ended(TOKENS, timing, 0, 4, None), now)
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            tracing.end()
    (leg,) = (one for one in made.seen if one.name == "leg")
    assert leg.attributes == {"error.type": "cancelled"}
    children = [one for one in made.seen if one.name != "leg"]
    assert {one.parent for one in children} == {leg.id}
    return children


@pytest.mark.parametrize(
    ("role", "phases", "spans"),
    [
        (DECODE, (5, 0, 0, 0), {"queue": 5, "lookup": 5}),
        (DECODE, (5, 3, 0, 0), {"queue": 5, "lookup": 5, "load": 3}),
        (DECODE, (5, 0, 2, 0), {"queue": 5, "lookup": 5, "compute": 2}),
        (DECODE, (5, 3, 2, 4), {"queue": 5, "lookup": 5, "load": 3, "compute": 6}),
        (PREFILL, (5, 0, 2, 0), {"queue": 5, "lookup": 5, "compute": 2, "save": 0}),
        (PREFILL, (5, 0, 2, 4), {"queue": 5, "lookup": 5, "compute": 2, "save": 4}),
    ],
)
async def test_the_phase_that_had_not_ended_ends_with_the_leg(
    role: Role, phases: tuple[int, int, int, int], spans: dict[str, int]
) -> None:
    seen = await drop(role, *phases)
    assert {one.name: round((one.end - one.begin) / 1e9) for one in seen} == spans
    for one in seen:
        if one.name == "load":  # a load that had not ended has verified nothing
            assert ("kvrelay.tokens.external" in one.attributes) == ("compute" in spans)
