"""Life cycle, health, reflection, refused addresses, and signals."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from kvrelay.errors import Mismatch, NotFound, Rejected, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.security.policy import Security
from kvrelay.rpc.server import errors
from kvrelay.rpc.server.server import Server, ServerOptions
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from tests.secured import OWN_HOST

SERVICE = "kvrelay.v1.DecodeService"


class Echo(decode_pb2_grpc.DecodeServiceServicer):
    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: decode_pb2_grpc._ServicerContext
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse(finish_reason=types_pb2.FINISH_REASON_STOP)


def echo_server(options: ServerOptions | None = None) -> Server:
    server = Server(options)
    server.add(SERVICE, lambda s: decode_pb2_grpc.add_DecodeServiceServicer_to_server(Echo(), s))
    return server


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    """Names of the services that reflection lists."""
    ask = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    answers = [answer async for answer in ask(iter(requests))]
    return {service.name for service in answers[0].list_services_response.service}


async def test_serves_with_health_and_reflection() -> None:
    server = echo_server()
    address = await server.start()
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":0")
    async with open_channel(address) as channel:
        assert await is_serving(channel, Deadline.after(10), SERVICE)
        answers = [
            a
            async for a in decode_pb2_grpc.DecodeServiceStub(channel).Decode(
                decode_pb2.DecodeRequest()
            )
        ]
        assert len(answers) == 1
        assert await is_serving(channel, Deadline.after(5))
        with pytest.raises(NotFound):
            await is_serving(channel, Deadline.after(5), "no.such.Service")
        await server.health.set(SERVICE, False)
        assert not await is_serving(channel, Deadline.after(5), SERVICE)
        assert SERVICE in await reflected(channel)
    await server.stop()
    await server.stop()


async def test_unix_socket(tmp_path: Path) -> None:
    server = echo_server(ServerOptions(f"unix:{tmp_path}/s"))
    address = await server.start()
    assert address == f"unix:{tmp_path}/s"
    async with open_channel(address) as channel:
        assert await is_serving(channel, Deadline.after(10))
    await server.stop()


async def test_taken_port_is_named() -> None:
    first = echo_server()
    address = await first.start()
    with pytest.raises(Rejected, match=address.replace(".", r"\.")) as caught:
        await echo_server(ServerOptions(address)).start()
    assert "choose another port" in str(caught.value)
    await first.stop()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
async def test_open_addresses_need_leave(address: str) -> None:
    with pytest.raises(Rejected, match="--allow-insecure"):
        await echo_server(ServerOptions(address)).start()


async def test_open_address_with_leave() -> None:
    server = echo_server(ServerOptions("0.0.0.0:0", security=Security(allow_insecure=True)))
    assert (await server.start()).startswith("0.0.0.0:")
    await server.stop()


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:x", "host:70000", "unix:", "h:²", "\0h:1", "a\nb:1"],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(Rejected, match="address"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["127.0.0.1:5", "[::1]:5", "localhost:0", "unix:/a/b", "h:1"])
def test_addresses_round_trip(text: str) -> None:
    assert str(Address.parse(text)) == text


async def test_keepalive_does_not_make_the_server_angry() -> None:
    server = echo_server()
    async with open_channel(await server.start()) as channel:
        await is_serving(channel, Deadline.after(5))
        assert channel.get_state() is grpc.ChannelConnectivity.READY
    await server.stop()


async def test_a_connection_that_says_nothing_is_closed() -> None:
    """It occupies one of the server's connections."""
    server = echo_server(ServerOptions(handshake_seconds=0.5))
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(20):
        with suppress(ConnectionResetError):
            await reader.read(-1)  # to its end
    writer.close()
    await server.stop()


PROGRAM = """
import asyncio, sys
from tests.rpc.test_server import echo_server
from kvrelay.rpc.server.run import serve_until_signal

async def drain(deadline):
    print("draining", flush=True)
    await asyncio.sleep(float(sys.argv[1]))

sys.exit(asyncio.run(serve_until_signal(
    echo_server(), ready=lambda a: f"ready at {a}", on_stop=drain, grace=0.5)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("drain_seconds", ["0", "60"])
def test_signal_drains_and_exits_0(number: signal.Signals, drain_seconds: str) -> None:
    command = [sys.executable, "-c", PROGRAM, drain_seconds]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready at 127.0.0.1:")
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output == "draining\n"


LIMITED = """
import resource
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.rpc.server.run import run_service

async def serve(config):
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1000)

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise SystemExit(run_service(SecurityOptions(), serve))
"""


def test_a_service_raises_its_limit_of_open_files() -> None:
    """A full server has more connections than many systems allow open files."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", LIMITED], env=environment, timeout=60, check=True)


async def test_stop_gives_running_calls_time() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    class Slow(decode_pb2_grpc.DecodeServiceServicer):
        async def Decode(
            self, request: decode_pb2.DecodeRequest, context: decode_pb2_grpc._ServicerContext
        ) -> AsyncIterator[decode_pb2.DecodeResponse]:
            entered.set()
            await leave.wait()
            yield decode_pb2.DecodeResponse()

    server = Server()
    server.add(SERVICE, lambda s: decode_pb2_grpc.add_DecodeServiceServicer_to_server(Slow(), s))
    async with open_channel(await server.start()) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest())
        reading = asyncio.ensure_future(anext(aiter(call)))
        await entered.wait()
        stopping = asyncio.ensure_future(server.stop(10))
        leave.set()
        assert await reading == decode_pb2.DecodeResponse()
        await stopping


async def test_connections_are_bounded() -> None:
    """One connection too many is closed at once; after another one closes there is room."""
    server = echo_server(ServerOptions(f"{OWN_HOST}:0", max_connections=2))
    host, port = (await server.start()).split(":")

    async def greeted() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port))
        return await reader.read(1), writer  # whoever is taken is sent settings

    async with asyncio.timeout(60):
        (first, one), (second, two), (third, three) = [await greeted() for _ in range(3)]
        assert (bool(first), bool(second), third) == (True, True, b"")
        one.close()
        three.close()
        while True:
            told, writer = await greeted()
            writer.close()
            if told:
                break
    two.close()
    await server.stop()


async def test_a_method_that_there_is_not_is_named_as_far_as_a_status_goes() -> None:
    server = echo_server()
    async with open_channel(await server.start()) as channel:
        for path, told in (
            ("/a.B/C", "no method /a.B/C on this server"),
            ("/a.B/" + "é" * 2000, "é... on this server"),
        ):
            call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call(timeout=10):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert told in (refused.value.details() or "")
            assert isinstance(from_rpc_error(refused.value), Mismatch)
    await server.stop()


class Skipping(selectors.DefaultSelector):
    """Adds the seconds that it would wait to ``passed``."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        self.passed += 0.0 if found or timeout is None else timeout
        return found


class SimulatedTime(asyncio.SelectorEventLoop):
    """Waits for no timer: its clock goes on when it would wait."""

    def __init__(self) -> None:
        self._waits = Skipping()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.passed


class SlowReader:
    """Takes each message after ``pause`` seconds."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.taken: list[int] = []

    async def write(self, message: int) -> None:
        await asyncio.sleep(self.pause)
        self.taken.append(message)


@pytest.mark.parametrize(("pause", "thinking"), [(0.0, 0.25), (0.12, 0.0)])
def test_a_stream_lasts_while_no_write_waits_too_long(pause: float, thinking: float) -> None:
    reader = SlowReader(pause)

    async def three(request: int, context: object) -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(thinking)
            yield number

    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(errors._writing(three, 0.2)(0, reader))  # type: ignore[arg-type]
    assert reader.taken == [0, 1, 2]


async def test_a_write_that_waits_too_long_ends_the_stream() -> None:
    closed = []

    async def endless(request: int, context: object) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    reader = SlowReader(3600.0)
    with pytest.raises(Unavailable, match="read nothing of it"):
        await errors._writing(endless, 0.1)(0, reader)  # type: ignore[arg-type]
    assert closed
    assert not reader.taken


async def test_a_handlers_own_timeout_is_not_the_clients() -> None:
    async def failing(request: int, context: object) -> AsyncIterator[int]:
        yield 1
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await errors._writing(failing, 60.0)(0, SlowReader(0.0))  # type: ignore[arg-type]
