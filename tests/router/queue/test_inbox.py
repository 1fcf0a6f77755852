"""Memory before a request is accepted: what one tenant sends, and what all send, is bounded."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.channel import ChannelOptions, open_channel
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Caller, CallerKind, Tenant
from kvrelay.rpc.server.connections import network_of, network_of_peer
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2
from router import service
from router.queue import inbox
from router.queue.inbox import Inbound, Inbox, Sender
from tests.router.fakes import Behaviour, Running, answer, decode_worker, ids, model, running
from tests.router.rig import PROMPT, request

ROOT = Path(__file__).parents[3]
SECONDS = 20.0
GENERATE = "/kvrelay.v1.RouterService/Generate"
MIB = 1 << 20
ALICE = "alice-shows-this-token"
CREDENTIALS = f"""
service = "services-show-this-token"
[tenants.alice]
token = "{ALICE}"
salt = "the salt of alice, secret"
max-requests = 8
"""


Stream: TypeAlias = (
    "grpc.aio.StreamStreamMultiCallable[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)
StreamCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)


class Mute:
    """A call that sends its headers, and its message only when told to."""

    def __init__(self, router: Running) -> None:
        self._send = asyncio.Event()
        call: Stream = router.channel.stream_stream(
            GENERATE,
            request_serializer=router_pb2.GenerateRequest.SerializeToString,
            response_deserializer=router_pb2.GenerateResponse.FromString,
        )
        self._task = asyncio.ensure_future(self._read(call(self._requests(), timeout=SECONDS)))

    async def _requests(self) -> AsyncIterator[router_pb2.GenerateRequest]:
        await self._send.wait()
        yield request()

    async def _read(self, call: StreamCall) -> list[router_pb2.GenerateResponse]:
        return [response async for response in call]

    async def say(self) -> list[router_pb2.GenerateResponse]:
        """Send the message, and read the responses."""
        self._send.set()
        return await self._task

    async def error(self) -> KvrelayError:
        """The error with which the call ends, though it has sent no message."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(asyncio.shield(self._task), SECONDS)
        return from_rpc_error(caught.value)


def tenant(monkeypatch: pytest.MonkeyPatch, tenant: Tenant) -> None:
    """Let every call be one of this tenant's."""
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))


async def open_requests(router: Running, tenant: Tenant, count: int) -> None:
    """Wait until a tenant has so many."""
    for _ in range(2000):
        if router.service.quotas.requests(tenant) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(router.service.quotas.requests(tenant))


async def test_quotas_count_before_a_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Tenant("small", max_requests=2)
    tenant(monkeypatch, small)
    async with running([decode_worker()]) as router:
        silent = [Mute(router) for _ in range(2)]
        await open_requests(router, small, 2)
        error = await Mute(router).error()  # it is refused, and has sent nothing
        assert isinstance(error, Exhausted)
        assert "'small' has 2 requests open, its limit" in str(error)
        for call in silent:
            assert ids(await call.say()) == answer(PROMPT, 8, 5)
        assert router.service.quotas.requests(small) == 0


async def test_messages_are_read_while_there_is_room_for_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of a tenant at once; another tenant's message is read beside them."""
    monkeypatch.setattr(inbox, "INBOX_BYTES", 8 * MIB)
    greedy, other = Tenant("greedy"), Tenant("other")
    tenant(monkeypatch, greedy)
    async with running([decode_worker()], max_message=MIB) as router:
        waiting = router.service.inbox.semaphore
        silent = [Mute(router) for _ in range(5)]
        await open_requests(router, greedy, 5)
        assert waiting.waiting == 3
        tenant(monkeypatch, other)
        assert ids(await router.generate(request())) == answer(PROMPT, 8, 5)
        for responses in await asyncio.gather(*(call.say() for call in silent)):
            assert ids(responses) == answer(PROMPT, 8, 5)
        assert waiting.waiting == 0


def test_each_network_without_a_tenant_has_a_share_of_its_own() -> None:
    unnamed, named = Tenant(), Tenant("named", weight=2.0)
    one, other = (Sender(unnamed, network_of(host)).holder for host in ("10.0.0.1", "10.0.0.2"))
    assert one.name != other.name
    same = [network_of(host) for host in ("2001:db8::1", "2001:db8::2:3%eth0")]
    assert same[0] == same[1] == network_of_peer("ipv6:%5B2001:db8::9%5D:5000")
    assert network_of("::ffff:10.0.0.1") == network_of_peer("ipv4:10.0.0.1:77") == "10.0.0.1"
    assert network_of("") == network_of_peer("unix:") == ""
    assert Sender(unnamed).holder == unnamed
    assert Sender(named, "10.0.0.1").holder == named


async def test_a_body_counts_as_its_copies_until_it_is_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "INBOX_BYTES", 8 * MIB)
    box, sender = Inbox(MIB), Sender(Tenant("t"), nbytes=MIB // 4)
    message = router_pb2.GenerateRequest(prompt="x" * 1000)
    held: list[int] = []

    async def read() -> Inbound:
        held.append(box.semaphore.held(sender.tenant))
        return Inbound(message=message)

    async with box.received(read, sender, Deadline.after(SECONDS)):
        held.append(box.semaphore.held(sender.tenant))
    held.append(box.semaphore.held(sender.tenant))
    assert held == [3 * MIB // 4, message.ByteSize(), 0]


async def test_a_client_that_sends_no_message_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "INBOX_BYTES", MIB)
    monkeypatch.setattr(inbox, "READ_SECONDS", 0.2)
    async with running([decode_worker()], max_message=MIB) as router:
        silent = Mute(router)
        await open_requests(router, Tenant(), 1)
        await asyncio.sleep(0.5)
        assert router.service.quotas.requests(Tenant()) == 1  # alone it may take its time
        done = asyncio.ensure_future(router.generate(request()))
        error = await silent.error()
        assert isinstance(error, DeadlineExceeded)
        assert "was not read within 0.2 s" in str(error)
        assert ids(await done) == answer(PROMPT, 8, 5)


async def test_a_running_request_keeps_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids are all that is kept: the next message is read though the inbox holds only one."""
    monkeypatch.setattr(inbox, "INBOX_BYTES", MIB)
    step = asyncio.Semaphore(0)
    decode = decode_worker(behaviour=Behaviour(step=step))
    async with running([decode], max_message=MIB) as router:
        calls = [asyncio.ensure_future(router.generate(request())) for _ in range(4)]
        while len(decode.legs) < 4:
            decode.entered.clear()
            await asyncio.wait_for(decode.entered.wait(), SECONDS)
        for _ in range(4 * 8):
            step.release()
        for call in calls:
            assert ids(await call) == answer(PROMPT, 8, 5)


async def test_a_message_above_the_limit_is_not_read() -> None:
    """The limit is twice that of a prompt, and a little: the prompt, and the output so far."""
    async with running([decode_worker()], max_prompt=MIB) as router:
        options = ChannelOptions(max_message_bytes=64 * MIB)
        async with open_channel(router.address, options) as channel:
            for size, field, limit in (
                (2 * MIB, "prompt", "bytes of text at most"),
                (3 * MIB, "request", f"a message can have {2 * MIB + (64 << 10)}"),
            ):
                call = Running(router.address, channel, router.registry, router.service)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.generate(router_pb2.GenerateRequest(prompt="x" * size))
                error = from_rpc_error(caught.value)
                assert isinstance(error, Rejected)
                assert error.field == field
                assert limit in str(error)


def resident(pid: int) -> float:
    """The most memory that a process had so far, in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) / 1024


@pytest.mark.slow
def test_one_tenant_cannot_take_the_routers_memory(tmp_path: Path) -> None:
    """200 messages of 7.9 MiB, and 48 of 31 MiB: the router grew by 4,000 and 1,400 MiB."""
    path = tmp_path / "credentials.toml"
    path.write_text(CREDENTIALS)
    path.chmod(0o600)
    flags = ["--model", str(model()), "--decode", "127.0.0.1:9", "--port", "0"]
    flags += ["--credentials", str(path), "--worker-wait", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" on ")[1].split(": ")[0]
        before = resident(process.pid)
        for count, size in ((200, 7.9), (48, 31.0)):
            raw = router_pb2.GenerateRequest(
                prompt="x y " * int(size * MIB / 4)
            ).SerializeToString()
            errors = asyncio.run(flood(address, raw, count))
            assert {type(error) for error in errors} <= {Exhausted, Rejected, Unavailable}
            grown = resident(process.pid) - before
            print(f"{count} messages of {size} MiB: {grown:.0f} MiB")
            assert grown < 350
    finally:
        process.kill()
        process.wait()


async def flood(address: str, raw: bytes, count: int) -> list[KvrelayError]:
    """Send a message so often, at once."""
    options = ChannelOptions(max_message_bytes=64 * MIB)

    async def one(channel: grpc.aio.Channel) -> KvrelayError:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
        try:
            async for _ in call(raw, metadata=(("authorization", f"Bearer {ALICE}"),), timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError("it was served")

    channels = [open_channel(address, options) for _ in range(4)]
    try:
        return await asyncio.gather(*(one(channels[n % 4]) for n in range(count)))
    finally:
        for channel in channels:
            await channel.close()
