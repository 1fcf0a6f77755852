"""How workers join: DNS names and announcements; and which are refused, with the field."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from kvrelay.errors import Exhausted, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import PROTOCOL
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import router_pb2, router_pb2_grpc, types_pb2
from kvrelay.worker.announce import Announcer, advertised, label
from router.config import RouterConfig
from router.workers import registry
from router.workers.dns import DnsNames, parse_name
from router.workers.health import HealthState
from router.workers.sources import (
    Announcements,
    WorkerAddresses,
    WorkerSources,
    check_announcement,
)
from tests.router.fakes import (
    FakeWorker,
    Running,
    answer,
    decode_worker,
    ids,
    namespace,
    prefill_worker,
    running,
)


def request() -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(max_tokens=3)
    message.token_ids.ids.append(9)
    message.sampling.seed = 1
    return message


class Zone:
    """A name server: ``None`` for one that does not answer."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = []
        self.asked = 0

    def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        if self.addresses is None:
            raise OSError("no name server")
        return [f"{address}:{port}" for address in self.addresses]


async def test_a_name_stands_for_all_its_addresses() -> None:
    zone = Zone()
    names = DnsNames(5.0, zone.resolve)
    zone.addresses = ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    entries = ("a:1", "dns:///w:7", "10.0.0.1:7")
    assert await names.expand(entries, 0.0) == ("a:1", "10.0.0.1:7", "10.0.0.2:7")
    zone.addresses = ["10.0.0.3"]
    assert "10.0.0.3:7" not in await names.expand(entries, 4.9)  # not due yet
    assert await names.expand(entries, 5.0) == ("a:1", "10.0.0.3:7", "10.0.0.1:7")
    assert zone.asked == 2
    names.close()


async def test_a_name_server_that_is_down_takes_nobody_away() -> None:
    zone = Zone()
    names = DnsNames(1.0, zone.resolve)
    zone.addresses = ["10.0.0.1"]
    assert await names.expand(("dns:///w:7",), 0.0) == ("10.0.0.1:7",)
    zone.addresses = None
    assert await names.expand(("dns:///w:7",), 1.0) == ("10.0.0.1:7",)
    zone.addresses = ["10.0.0.2"]
    assert await names.expand(("dns:///w:7",), 2.0) == ("10.0.0.2:7",)
    names.close()


async def test_names_of_both_roles_are_known_side_by_side() -> None:
    zone, now = Zone(), WorkerAddresses(("10.0.0.1:7",), ("10.0.0.1:8", "10.0.0.1:9"))
    zone.addresses = ["10.0.0.1"]
    names = DnsNames(0.001, zone.resolve)
    config = RouterConfig(model="m", prefill=("dns:///p:7",), decode=("dns:///d:8", "dns:///d:9"))
    sources = WorkerSources(config, names)
    assert await sources.read() == now
    zone.addresses = None
    await asyncio.sleep(0.002)
    assert await sources.read() == now
    assert zone.asked == 6
    assert len(names._known) == 3
    sources._config = replace(config, prefill=(), decode=("dns:///d:9",))
    assert await sources.read() == WorkerAddresses((), ("10.0.0.1:9",))
    assert len(names._known) == 1
    sources.close()


async def test_a_resolver_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.dns.LOOKUP_SECONDS", 0.05)
    let_go = threading.Event()

    def hang(host: str, port: int) -> Sequence[str]:
        let_go.wait(30)
        return []

    names = DnsNames(0.0, hang)
    for turn in range(8):  # more than there are threads
        assert await names.expand(("a:1", "dns:///w:7"), float(turn)) == ("a:1",)
    let_go.set()
    names.close()


def test_what_is_no_name() -> None:
    for text in ("dns:///w", "dns:///:7", "dns:///w:seven", "dns:///"):
        with pytest.raises(Rejected, match="decode"):
            parse_name("decode", text)
    parse_name("decode", "dns:///w:7")


async def test_workers_behind_a_name_join_and_leave() -> None:
    zone, worker = Zone(), decode_worker()
    await worker.start()
    host, _, port = worker.address.rpartition(":")
    zone.addresses = [host]
    name = f"dns:///decode.test:{port}"
    async with running([], used=0, decode=(name,), dns_interval=0.1) as router:
        registry = router.registry
        registry._sources = WorkerSources(registry._config, DnsNames(0.1, zone.resolve))
        await router.settled(used=1, listed=1)
        assert ids(await router.generate(request())) == answer([9], 3, 1)
        zone.addresses = ["127.0.0.9"]
        assert await registry.wait_for(
            lambda: [w.address for w in registry.workers] == [f"127.0.0.9:{port}"],
            Deadline.after(10),
        )
    await worker.stop()


def test_announcements_hold_for_a_time_and_are_bounded() -> None:
    announced = Announcements()
    announced.add("h:1", 2.0, 0.0, 2)
    announced.add("h:2", 10.0, 0.0, 2)
    announced.add("h:1", 2.0, 1.0, 2)
    with pytest.raises(Exhausted):
        announced.add("h:3", 10.0, 2.9, 2)
    assert announced.listed(2.9) == ("h:1", "h:2")
    announced.add("h:3", 10.0, 3.0, 2)  # the first one has expired
    assert announced.listed(3.0) == ("h:2", "h:3")


@pytest.mark.parametrize(
    ("address", "ttl", "field"),
    [
        ("", 5.0, "address"),
        ("nowhere", 5.0, "address"),
        ("h:0", 5.0, "address"),
        ("unix:/tmp/s", 5.0, "address"),
        ("h:1", 0.0, "ttl_seconds"),
        ("h:1", float("nan"), "ttl_seconds"),
        ("h:1", 1e9, "ttl_seconds"),
    ],
)
def test_what_is_no_announcement(address: str, ttl: float, field: str) -> None:
    with pytest.raises(Rejected, match=field):
        check_announcement(address, ttl)


async def announce(
    router: Running, address: str, ttl: float, leaving: bool = False
) -> router_pb2.AnnounceResponse:
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    message = router_pb2.AnnounceRequest(address=address, ttl_seconds=ttl, leaving=leaving)
    try:
        return await stub.Announce(message, timeout=10)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def test_an_announced_worker_is_asked_back_used_and_forgotten() -> None:
    first, second = prefill_worker(), decode_worker()
    for worker in (first, second):
        await worker.start()
    async with running([], used=0, announce=True, disaggregate="always") as router:
        for worker in (first, second):
            said = await announce(router, worker.address, 60.0)
            assert (
                said.state == HealthState.STARTING.value
            )  # nothing is believed before it was checked
        await router.settled(used=2, listed=2)
        assert (await announce(router, second.address, 60.0)).state == HealthState.READY.value
        assert ids(await router.generate(request())) == answer([9], 3, 1)
        assert first.legs
        assert second.legs
        for worker in (first, second):
            await announce(router, worker.address, 1.0)
        await router.settled(used=0, listed=0)  # neither announced itself again
    for worker in (first, second):
        await worker.stop()


async def test_an_announcement_may_expire_before_the_sources_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came and went between two reads: the worker stayed listed for ever."""
    monkeypatch.setattr(registry, "FOLLOW_SECONDS", 2.0)
    worker = decode_worker()
    async with running([], used=0, announce=True) as router:
        await announce(router, await worker.start(), 1.0)
        await router.settled(used=0, listed=0)
    await worker.stop()


async def test_an_announcement_alone_brings_nobody_in() -> None:
    good, other = decode_worker(), decode_worker("d1", namespace=namespace(dtype="float16"))
    async with running([good], announce=True, max_workers=3) as router:
        await announce(router, "127.0.0.1:9", 60.0)  # no worker there
        await announce(router, await other.start(), 60.0)
        await router.settled(used=1, listed=3)
        said = await announce(router, other.address, 60.0)
        assert "namespace.dtype" in said.reason
        with pytest.raises(Exhausted):
            await announce(router, "127.0.0.1:10", 60.0)
        await announce(router, good.address, 60.0)  # listed by a flag: still one worker
        assert len(router.registry.workers) == 3
    await other.stop()


async def test_a_worker_at_two_addresses_is_one_worker() -> None:
    """As behind a name with an A and an AAAA record; it would be given twice its share."""
    worker = decode_worker()
    async with running([worker]) as router:
        twin = f"localhost:{worker.address.rpartition(':')[2]}"
        router.registry.update(WorkerAddresses((), (worker.address, twin)))
        await router.settled(used=1, listed=2)
        assert f"this is the worker at {worker.address}" in str(router.registry.workers[1].problem)
        router.registry.update(WorkerAddresses((), (twin,)))
        await router.settled(used=1, listed=1)


async def test_a_router_takes_no_announcements_unless_told_to() -> None:
    async with running([worker := decode_worker()]) as router:
        with pytest.raises(Rejected, match="--announce"):
            await announce(router, "127.0.0.1:9", 60.0)
        with pytest.raises(Rejected, match="--announce"):
            await announce(router, worker.address, 60.0, leaving=True)
        (listed,) = router.registry.workers
        assert listed.health.state is HealthState.READY


async def test_a_worker_announces_itself_until_it_ends() -> None:
    worker = decode_worker()
    await worker.start()
    async with running([], used=0, announce=True) as router:
        announcer = Announcer((router.address,), None)
        announcer.begin(worker.address)
        await router.settled(used=1, listed=1)
        announcer.end()
    await worker.stop()


def test_what_a_worker_may_not_announce() -> None:
    assert advertised("127.0.0.1:5", None) == "127.0.0.1:5"
    assert advertised("0.0.0.0:5", "worker.test:6") == "worker.test:6"
    for bound, advertise in (
        ("0.0.0.0:5", None),
        ("[::]:5", None),
        ("h:5", "h"),
        ("unix:/s", None),
    ):
        with pytest.raises(Rejected, match="advertise"):
            advertised(bound, advertise)
    with pytest.raises(Rejected, match="router"):
        Announcer(("nowhere",), None)


def test_a_worker_on_every_address_has_the_one_of_its_host_in_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a router that looks up the name of a container has it: no two workers share a label."""
    assert label("0.0.0.0", 5, "worker.test:6") == "worker.test:6"
    assert label("10.0.0.9", 5, None) == "10.0.0.9:5"
    monkeypatch.setattr(socket, "gethostname", lambda: "f00d")
    for found, expected in (("10.0.0.7", "10.0.0.7:5"), ("127.0.1.1", "f00d:5"), ("", "f00d:5")):

        def look_up(name: str, found: str = found) -> str:
            if not found:
                raise OSError(f"{name} is unknown")
            return found

        monkeypatch.setattr(socket, "gethostbyname", look_up)
        for host in ("0.0.0.0", "::"):
            assert label(host, 5, None) == expected


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
async def test_another_protocol_is_refused(protocol: int) -> None:
    good, bad = decode_worker(), decode_worker("d1", protocol=protocol)
    async with running([good, bad], used=1) as router:
        (refused,) = (w for w in router.registry.workers if not w.usable)
        assert str(refused.problem).startswith("protocol: ")
        assert str(PROTOCOL) in str(refused.problem)


@pytest.mark.parametrize("started_as", [types_pb2.ROLE_PREFILL, types_pb2.ROLE_UNSPECIFIED])
async def test_a_role_must_be_the_one_listed_or_changed_since(started_as: int) -> None:
    """Listed for prefill, decodes: accepted only if it began as a prefill worker."""
    changed = decode_worker("d1", started_as=started_as)
    address = await changed.start()
    right = started_as == types_pb2.ROLE_PREFILL
    async with running([decode_worker()], used=1 + right, prefill=(address,)) as router:
        known = next(w for w in router.registry.workers if w.address == address)
        assert known.usable == right
        if right:
            assert known in router.registry.usable(types_pb2.ROLE_DECODE)
        else:
            assert str(known.problem).startswith("role: ")
    await changed.stop()


async def test_legs_of_a_worker_no_longer_listed_are_watched_to_their_end() -> None:
    gate = asyncio.Event()
    leaving, other = decode_worker("d0"), decode_worker("d1")
    leaving.behaviour.tokens = gate
    async with running([leaving]) as router:
        call = asyncio.ensure_future(router.generate(request()))
        await leaving.entered.wait()
        await other.start()
        await _list(router, other)
        await router.settled(used=1, listed=1)
        leaving.behaviour.checks = asyncio.Event()  # silent from now on
        assert ids(await call) == answer([9], 3, 1)
        assert other.legs
        gate.set()
    await other.stop()


async def _list(router: Running, worker: FakeWorker) -> None:
    router.registry.update(WorkerAddresses((), (worker.address,)))


def test_a_router_needs_a_source_of_workers() -> None:
    with pytest.raises(Rejected, match="--announce"):
        RouterConfig(model="m")
    RouterConfig(model="m", announce=True)
