"""The least work between a client and a worker: bytes of a call in, bytes out.

    python -P -m benchmarks.cluster.relay HOST:PORT

No message is parsed and nothing decided; asyncio gRPC on both sides, as in the router.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvrelay.errors import Unavailable
from kvrelay.installation import import_path
from kvrelay.rpc.channel import open_channel

UNARY = "/kvrelay.v1.WorkerService/"
START_SECONDS = 30.0
Once: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
Many: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class RelayHandlers(grpc.GenericRpcHandler):
    """Forwards any call; those of ``Worker`` are answered once, others stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method
        if method.startswith(UNARY):
            once: Once = self._channel.unary_unary(method)

            async def ask(request: bytes, context: object) -> bytes:
                return await once(request)

            return grpc.unary_unary_rpc_method_handler(ask)
        many: Many = self._channel.unary_stream(method)

        async def pass_on(request: bytes, context: object) -> AsyncIterator[bytes]:
            async for message in many(request):
                yield message

        return grpc.unary_stream_rpc_method_handler(pass_on)


async def serve(target: str) -> None:
    """Print the address and forward until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with open_channel(target) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((RelayHandlers(channel),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await stopping.wait()
        await server.stop(0)


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay in a process of its own."""

    address: str
    pid: int


@contextmanager
def relay(target: str) -> Iterator[Relay]:
    """Start a relay process, and end it."""
    command = [sys.executable, "-P", "-m", "benchmarks.cluster.relay", target]
    environ = {**os.environ, **import_path(os.environ)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (address := process.stdout.readline().strip()):
                raise Unavailable("the relay did not start")
            yield Relay(address, process.pid)
        finally:
            process.terminate()
            process.wait(START_SECONDS)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
