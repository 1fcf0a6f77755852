"""A leg is said to have arrived before anything is done for it: it may wait long for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from decode_service.service import DecodeService
from kvrelay.v1 import decode_pb2, prefill_pb2
from prefill_service.service import PrefillService


class Context:
    """Notes the headers."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    async def send_initial_metadata(self, metadata: object) -> None:
        self.told.set()


class Queue:
    """A worker that never runs a leg."""

    @asynccontextmanager
    async def run(self, *leg: object) -> AsyncIterator[AsyncIterator[object]]:
        yield self._nothing()

    async def _nothing(self) -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield None


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_headers_come_before_the_turn(role: str) -> None:
    worker, context = Queue(), Context()
    if role == "prefill":
        answer = PrefillService(worker).Prefill(  # type: ignore[arg-type]
            prefill_pb2.PrefillRequest(),
            context,  # type: ignore[arg-type]
        )
        waiting = asyncio.ensure_future(anext(answer))
    else:
        decoding = DecodeService(worker).Decode(  # type: ignore[arg-type]
            decode_pb2.DecodeRequest(),
            context,  # type: ignore[arg-type]
        )
        waiting = asyncio.ensure_future(anext(decoding))  # type: ignore[arg-type]
    await asyncio.wait_for(context.told.wait(), 10)
    assert not waiting.done()
    waiting.cancel()
