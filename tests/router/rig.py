"""Requests and steps that several tests of the router share."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvrelay.errors import KvrelayError
from kvrelay.process import logs
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, types_pb2
from router.workers.sources import WorkerAddresses
from tests.router.fakes import FakeWorker, Running

PROMPT = list(range(10, 21))


def request(max_tokens: int = 8, **sampling: object) -> router_pb2.GenerateRequest:
    """For ``PROMPT``, with seed 5."""
    result = router_pb2.GenerateRequest(max_tokens=max_tokens)
    result.token_ids.ids.extend(PROMPT)
    values = types_pb2.Sampling(**{"seed": 5, **sampling})  # type: ignore[arg-type]
    result.sampling.CopyFrom(values)
    return result


async def failing(call: object) -> KvrelayError:
    """The error of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return from_rpc_error(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def join(router: Running, *workers: FakeWorker) -> None:
    """List exactly these workers, as a changed workers file would."""
    for worker in workers:
        if not worker.address:
            await worker.start()
    roles = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
    by_role = [tuple(w.address for w in workers if w.role == role) for role in roles]
    router.registry.update(WorkerAddresses(*by_role))


@contextmanager
def json_log() -> Iterator[io.StringIO]:
    """The log of this process as JSON lines; its handlers and level come back at the end."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    made = io.StringIO()
    logs.setup("router", "error", made, form="json")
    try:
        yield made
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
