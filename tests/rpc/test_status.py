"""Every error survives the wire; gRPC's own errors become ours too."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay import errors
from kvrelay.cluster.ports import free_ports
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.server.parsing import malformed
from kvrelay.rpc.server.server import Server
from kvrelay.rpc.status import NothingListens, from_rpc_error
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

ERRORS = [
    (errors.Rejected("sampling.top_p", "must lie in (0, 1], got 2"), "INVALID_ARGUMENT"),
    (errors.NotFound("model 'x' is not served"), "NOT_FOUND"),
    (errors.Mismatch("namespace.dtype", "float32 is not bfloat16"), "FAILED_PRECONDITION"),
    (errors.Exhausted("the queue is full", 2.25), "RESOURCE_EXHAUSTED"),
    (errors.Unavailable("draining"), "UNAVAILABLE"),
    (errors.Draining("leaving"), "UNAVAILABLE"),
    (errors.DeadlineExceeded("no time left"), "DEADLINE_EXCEEDED"),
    (errors.Corrupt("checksum", "differs"), "DATA_LOSS"),
    (errors.Unservable("sliding window"), "FAILED_PRECONDITION"),
    (errors.Rejected("prompt", "ü" * 10_000), "INVALID_ARGUMENT"),
]


class Faulty(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.closed = asyncio.Event()
        self.entered = asyncio.Event()

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: decode_pb2_grpc._ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        try:
            yield decode_pb2.DecodeResponse()
            self.entered.set()
            if request.handoff.saved_tokens:
                await asyncio.sleep(60)
            raise self.error
        finally:
            self.closed.set()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        raise self.error

    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.GetLoadResponse:
        raise self.error

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.SetRoleResponse:
        raise NotImplementedError

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.DrainResponse:
        raise self.error

    async def Audit(
        self, request: worker_pb2.AuditRequest, context: worker_pb2_grpc._ServicerContext
    ) -> worker_pb2.AuditResponse:
        raise self.error


async def exhaust(channel: grpc.aio.Channel) -> None:
    """One whole Decode call."""
    async for _ in decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest()):
        pass


def _same(raw: bytes) -> bytes:
    return raw


def raw_call(
    channel: grpc.aio.Channel, method: str, raw: bytes
) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
    """A call with raw bytes."""
    call = channel.unary_unary(method, request_serializer=_same, response_deserializer=_same)
    return call(raw)


async def start(faulty: Faulty) -> tuple[Server, str]:
    server = Server()
    server.add(
        "kvrelay.v1.DecodeService",
        lambda s: decode_pb2_grpc.add_DecodeServiceServicer_to_server(faulty, s),
    )
    server.add(
        "kvrelay.v1.WorkerService",
        lambda s: worker_pb2_grpc.add_WorkerServiceServicer_to_server(faulty, s),
    )
    return server, await server.start()


async def raised(faulty: Faulty, kind: str) -> grpc.aio.AioRpcError:
    server, address = await start(faulty)
    try:
        async with open_channel(address) as channel:
            info = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (info(worker_pb2.GetInfoRequest()) if kind == "unary" else exhaust(channel))
            return caught.value
    finally:
        await server.stop()


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize(("error", "code"), ERRORS)
async def test_errors_survive(error: errors.KvrelayError, code: str, kind: str) -> None:
    caught = await raised(Faulty(error), kind)
    assert caught.code() is grpc.StatusCode[code]
    back = from_rpc_error(caught)
    assert type(back) is type(error)
    assert str(back)[:400] == str(error)[:400]
    if isinstance(error, errors.Rejected | errors.Mismatch | errors.Corrupt):
        assert getattr(back, "field", None) == error.field
    if isinstance(error, errors.Exhausted) and isinstance(back, errors.Exhausted):
        assert back.retry_after == pytest.approx(error.retry_after)


async def test_foreign_errors_stay_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "kvrelay.rpc"):
        caught = await raised(Faulty(ZeroDivisionError("secret")), "stream")
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.details() or "")
    assert "secret" in caplog.text
    assert "/kvrelay.v1.DecodeService/Decode" in caplog.text
    assert type(from_rpc_error(caught)) is errors.KvrelayError


async def test_a_client_that_leaves_closes_the_generator() -> None:
    faulty = Faulty(ValueError())
    server, address = await start(faulty)
    async with open_channel(address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(
            decode_pb2.DecodeRequest(handoff=types_pb2.Handoff(saved_tokens=1))
        )
        await anext(aiter(call))
        await faulty.entered.wait()
        call.cancel()
        await asyncio.wait_for(faulty.closed.wait(), 20)
    await server.stop()


async def test_what_grpc_says() -> None:
    server, address = await start(Faulty(ValueError()))
    async with open_channel(address, ChannelOptions(max_message_bytes=64 << 20)) as channel:
        handoff = types_pb2.Handoff(last_block_name=bytes(9 << 20))
        big = decode_pb2.DecodeRequest(handoff=handoff)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(decode_pb2_grpc.DecodeServiceStub(channel).Decode(big)))
        error = from_rpc_error(caught.value)
        assert isinstance(error, errors.Rejected)
        assert re.search(r"^request: has \d+ bytes, and a message can have \d+: ", str(error))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(channel, "/kvrelay.v1.DecodeService/Nothing", b"")
        assert isinstance(from_rpc_error(caught.value), errors.Mismatch)
    await server.stop()
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exhaust(channel)
        assert isinstance(from_rpc_error(caught.value), errors.Unavailable)


def bad_stop(good: str, bad: bytes) -> bytes:
    """A GenerateRequest whose second stop string is ``bad``, made by patching the bytes."""
    request = router_pb2.GenerateRequest(prompt="p")
    request.sampling.stop.extend([good, "@" * len(bad)])
    return request.SerializeToString().replace(b"@" * len(bad), bad)


MALFORMED = [
    (bad_stop("é", b"\xc3\x28"), "sampling.stop[1]"),
    (b"\x1a\x02\xff\xfe", "prompt"),
    (b"\x2a\x06\x0a\x04\x12\x02\xff\xfe", "chat.messages[0].content"),
    (b"\xff\xff\xff", "request"),
    (b"\x1a\x7f", "request"),
]


@pytest.mark.parametrize(("raw", "field"), MALFORMED)
def test_the_field_of_malformed_bytes(raw: bytes, field: str) -> None:
    error = malformed(router_pb2.GenerateRequest, raw)
    assert error.field == field


@pytest.mark.parametrize(
    "method", ["/kvrelay.v1.DecodeService/Decode", "/kvrelay.v1.WorkerService/GetInfo"]
)
async def test_malformed_bytes_over_the_wire(method: str) -> None:
    server, address = await start(Faulty(ValueError()))
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw_call(channel, method, b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad_id = b"\x0a\x04\x0a\x02\xff\xfe"
        if method.endswith("Decode"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw_call(channel, method, bad_id)
            error = from_rpc_error(caught.value)
            assert isinstance(error, errors.Rejected)
            assert error.field == "leg.request_id"
    await server.stop()


class _Context:
    def __init__(self, remaining: float | None) -> None:
        self.remaining = remaining

    def time_remaining(self) -> float | None:
        return self.remaining


def test_deadline() -> None:
    assert 4 < Deadline.from_context(_Context(None), 5, 10).remaining() <= 5
    assert 9 < Deadline.from_context(_Context(50), 5, 10).remaining() <= 10
    assert 0 < Deadline.from_context(_Context(1), 5, 10).earlier(0.5).remaining() <= 0.5
    past = Deadline.from_context(_Context(-1), 5, 10)
    assert past.expired
    assert past.remaining() == 0
    with pytest.raises(errors.DeadlineExceeded, match="no time left to prefill"):
        past.check("to prefill")


@settings(deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_explained(raw: bytes) -> None:
    assert malformed(router_pb2.GenerateRequest, raw).field
    assert malformed(object(), raw).field == "request"


ALL = "failed to connect to all addresses; last error: "
NO_CONNECTION = [
    (
        "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
        "nothing listens at 127.0.0.1:1",
    ),
    (
        "UNKNOWN: ipv6:%5B::1%5D:1: Failed to connect to remote host: connect: Connection refused"
        " (111)",
        "nothing listens at [::1]:1",
    ),
    (
        "FAILED_PRECONDITION: unix:/tmp/no: connect failed: addr: unix:/tmp/no error: No such file"
        " or directory",
        "nothing listens at unix:/tmp/no",
    ),
    (
        "UNKNOWN: ipv4:10.0.0.1:5: connection attempt timed out before receiving SETTINGS frame",
        "10.0.0.1:5 accepts connections but does not answer",
    ),
    (
        "INTERNAL: ipv4:10.0.0.1:5: Failed parsing HTTP/2 (Expected SETTINGS frame as the first"
        " frame, got frame type 80)",
        "10.0.0.1:5 is no gRPC server: is it the address of another service?",
    ),
    (
        "UNKNOWN: ipv4:10.0.0.1:5: Failed to connect to remote host: No route to host",
        "no connection to 10.0.0.1:5: No route to host",
    ),
]


def _failed(text: str) -> grpc.RpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, text)


@pytest.mark.parametrize(("text", "words"), NO_CONNECTION)
def test_a_failed_connection_is_said_in_words(text: str, words: str) -> None:
    error = from_rpc_error(_failed(ALL + text))
    assert isinstance(error, errors.Unavailable)
    assert str(error) == words
    assert isinstance(error, NothingListens) == ("nothing listens" in words)


def test_a_name_without_an_address_is_said_in_words() -> None:
    text = "errors resolving h:1: [field:hostname lookup error:address lookup failed for h:1: x]"
    assert str(from_rpc_error(_failed(text))).startswith("the name in h:1 has no address")


async def test_grpc_refuses_a_connection_in_these_words() -> None:
    """The texts above are those of the installed gRPC."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.RpcError) as failed:
            await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=20)
    assert str(from_rpc_error(failed.value)) == f"nothing listens at {address}"
