"""A refused call leaves no reference cycle to the garbage collector."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.errors import Rejected
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.server.server import Server

NAME = "a.Refuser"


class Mark:
    """An object held by a handler's frame."""


class Refuser:
    def __init__(self) -> None:
        self.marks: list[weakref.ref[Mark]] = []

    async def one(self, request: bytes, context: object) -> bytes:
        mark = Mark()
        self.marks.append(weakref.ref(mark))
        raise Rejected("field", "is wrong")

    async def many(self, requests: AsyncIterator[bytes], context: object) -> bytes:
        """Reads one of several requests."""
        mark = Mark()
        self.marks.append(weakref.ref(mark))
        async for _ in requests:
            break
        raise Rejected("field", "is wrong")

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "One": grpc.unary_unary_rpc_method_handler(self.one),
            "Many": grpc.stream_unary_rpc_method_handler(self.many),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


async def sent(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x"


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("method", ["One", "Many"])
async def test_a_refused_call_is_gone_at_once(method: str) -> None:
    service, server = Refuser(), Server()
    server.add(NAME, service.register)
    async with open_channel(await server.start()) as channel:
        call: grpc.aio.StreamUnaryMultiCallable[bytes, bytes]
        call = channel.stream_unary(f"/{NAME}/{method}")
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError, match="is wrong"):
                await call(sent(3 if method == "Many" else 1))
        assert len(service.marks) == 20
        for _ in range(2000):
            if all(mark() is None for mark in service.marks):
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("a call is still there")
    await server.stop()
