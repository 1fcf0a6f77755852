"""Method names and headers that are not UTF-8, from anyone who can connect."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

import grpc
import pytest

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.health import is_serving
from kvrelay.rpc.server import workarounds
from tests.fuzz.wire import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, headers
from tests.rpc.test_server import echo_server

NAME, SPOILT = "/kvrelay.v1.DecodeService/XX", b"/kvrelay.v1.DecodeService/\xff\xfe"
SECRET = "spoilt-secret-of-a-client-XX"


async def status(address: str, block: bytes) -> bytes:
    """The server's reply to the headers of a call."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    writer.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
    try:
        async with asyncio.timeout(20):
            return await reader.readuntil(b"grpc-status") + await reader.read(1000)
    finally:
        writer.close()


async def test_a_name_that_is_no_text_ends_no_server() -> None:
    server = echo_server()
    address = await server.start()
    for _ in range(3):
        told = await status(address, headers(NAME, None).replace(NAME.encode(), SPOILT))
        assert b"12" in told  # UNIMPLEMENTED
    async with open_channel(address) as channel:
        assert await is_serving(channel, Deadline.after(20))
    await server.stop()


async def test_strict_decoding_stays_strict_everywhere_else() -> None:
    workarounds.tolerate_bad_method_names()
    workarounds.tolerate_bad_method_names()
    for raw, encoding in ((b"/\xff", "utf-8"), (b"\xff", "ascii")):
        with pytest.raises(UnicodeDecodeError):
            raw.decode(encoding)
        with pytest.raises(UnicodeDecodeError):
            await asyncio.to_thread(raw.decode, encoding)
    with pytest.raises(UnicodeEncodeError):
        "\ud800".encode("latin-1")


async def test_a_spoilt_token_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    server = echo_server()
    address = await server.start()
    block = headers(NAME, SECRET).replace(b"-XX", b"-\xff\xfe")
    with caplog.at_level(logging.DEBUG):
        await status(address, block)
    await server.stop()
    assert "spoilt-secret" not in caplog.text
    assert "ERROR" not in caplog.text


PROGRAM = """
import asyncio, sys
from kvrelay.rpc.server import run, server
from tests.rpc.test_server import echo_server
server.tolerate_bad_method_names = lambda: None
sys.exit(asyncio.run(run.serve_until_signal(echo_server(), ready=lambda address: address)))
"""


def test_no_process_lives_on_without_its_server() -> None:
    """And grpcio still needs the workaround: once it does not, this fails and says what to do."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        asyncio.run(status(address, headers(NAME, None).replace(NAME.encode(), SPOILT)))
        fixed = f"grpcio {grpc.__version__} survives it: set FIXED_IN in workarounds.py"
        try:
            assert process.wait(20) == 1, fixed
        except subprocess.TimeoutExpired:
            pytest.fail(fixed)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("fixed_in", "version", "needed"),
    [
        (None, "1.85.1", True),
        ((1, 90), "1.89.2", True),
        ((1, 90), "1.90.0rc1", False),
        ((1, 90), "2.0.0", False),
    ],
)
def test_the_handler_of_strict_decoding_is_replaced_up_to_the_release_that_is_fixed(
    fixed_in: tuple[int, int] | None, version: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workarounds, "FIXED_IN", fixed_in)
    assert workarounds.needs_tolerant_decoding(version) == needed
