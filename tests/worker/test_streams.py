"""Legs of a worker that leaves are handed back; those of one that changes its role are not."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvrelay.engine.core.request import Order
from kvrelay.engine.engine import Engine
from kvrelay.errors import Draining
from kvrelay.rpc.deadline import Deadline
from kvrelay.sampling import Sampling
from kvrelay.worker.streams import LegStreams

PATIENCE = 10.0


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Legs are waited for only so long; all else has the time of the deadline."""
    monkeypatch.setattr("kvrelay.worker.streams._most_of", lambda deadline: 0.05)


class Idle:
    """An engine that takes orders and does nothing."""

    def submit(self, *order: object) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass


async def _leg(streams: LegStreams, began: asyncio.Event, request_id: str = "a") -> None:
    order = Order(request_id, (1,), 1, 2, frozenset())
    async with streams.run(cast("Engine", Idle()), order, Sampling(), None) as batches:
        began.set()
        async for _ in batches:
            pass


async def _begun(streams: LegStreams) -> asyncio.Task[None]:
    began = asyncio.Event()
    leg = asyncio.create_task(_leg(streams, began))
    await began.wait()
    return leg


async def test_a_role_that_cannot_be_changed_costs_no_leg() -> None:
    streams = LegStreams()
    leg = await _begun(streams)
    with pytest.raises(TimeoutError):
        async with streams.emptied(Deadline.after(PATIENCE)):
            raise AssertionError("a leg is here")
    assert (streams.open, streams.draining, leg.done()) == (1, False, False)
    leg.cancel()
    await asyncio.wait((leg,))
    async with streams.emptied(Deadline.after(PATIENCE)):
        with pytest.raises(Draining):
            await _leg(streams, asyncio.Event())
    assert not streams.draining


async def test_a_worker_that_leaves_hands_its_legs_back() -> None:
    streams = LegStreams()
    leg = await _begun(streams)
    await streams.drain(Deadline.after(PATIENCE))
    with pytest.raises(Draining, match="resume elsewhere"):
        await leg
    assert (streams.open, streams.draining) == (0, True)
