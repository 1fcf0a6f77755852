"""Spans of calls to the store, by its client and by its process: those of a traced caller only."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvrelay.rpc import tracing
from kvrelay.rpc.tracing import TracingOptions
from kvstore import Store, Tail, Want, connect
from kvstore.base import NameQuery
from kvstore.client.transports.selector import TRANSPORTS
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.redis.redisserver import Server
from tests.kvstore.rig import TIMEOUT, chain, get, make, name_of, offer
from tests.otlp import Collector, Seen, collector

pytestmark = pytest.mark.cluster
LARGE = 300 << 10
PREFIX = "spans:"


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as made:
        tracing.install(TracingOptions(otlp_endpoint=made.url), "worker")
        yield made
        tracing.end()


@contextmanager
def service(spans: Collector, *flags: str) -> Iterator[str]:
    """The URL of a store process; it has sent its spans when the context ends."""
    process, url = start_service(f"--otlp-endpoint={spans.url}", *(flags or ["--budget=16MiB"]))
    try:
        yield url
        _end(process)
    finally:
        stop(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.wait(60) == 0


def below(spans: Collector) -> tuple[Sequence[Seen], Sequence[Seen]]:
    """The spans of the leg's calls, and those of the store, which are their children."""
    tracing.end()
    seen = sorted(spans.seen, key=lambda span: span.begin)
    (leg,) = (span for span in seen if span.name == "leg")
    assert {span.trace for span in seen} == {leg.trace}
    calls = [span for span in seen if span.parent == leg.id]
    every = [span for span in seen if span.service == "kvrelay-store"]
    assert {span.kind for span in calls} == {"client"}
    assert {span.service for span in calls} == {"kvrelay-worker"}
    assert {span.parent for span in every} <= {call.id for call in calls} | {s.id for s in every}
    assert len(seen) == 1 + len(calls) + len(every)
    return calls, every


def written(store: Store) -> None:
    """Wait until every block is on disk too."""
    while (disk := store.stats(TIMEOUT).disk) is None or disk.unsaved:
        time.sleep(0.005)


def only(every: Sequence[Seen], name: str) -> Mapping[str, object]:
    (span,) = (span for span in every if span.name == name)
    return span.attributes


def use(store: Store) -> None:
    """A lookup, a put and a get of three blocks, of which two are stored; and calls untraced."""
    offers = chain(2, LARGE)
    blocks = [one.read() for one in offers]
    absent = make(LARGE)
    with tracing.serving("leg", ()) as leg, tracing.under(leg):
        store.put(offers, TIMEOUT)
        names = [name_of(block) for block in (*blocks, absent)]
        found = store.lookup(NameQuery(names, [Tail(2, b"t" * 32)]), TIMEOUT)
        assert found.lead == 2
        get(store, *blocks)
    get(store, *blocks)
    store.lookup(NameQuery(names), TIMEOUT)


def check_calls(calls: Sequence[Seen], url: str, transport: str | None) -> None:
    """The spans of ``use`` in its own process."""
    assert [call.name for call in calls] == ["store put", "store lookup", "store get"]
    assert all(str(call.attributes["kvrelay.store.url"]).startswith(url) for call in calls)
    assert not any("error.type" in call.attributes for call in calls)
    put, looked_up, got = (dict(call.attributes) for call in calls)
    for one in (put, looked_up, got):
        assert one.pop("kvrelay.store.url")
    sent = put["kvrelay.store.bytes"]
    assert int(str(sent)) > 2 * LARGE
    moved = {} if transport is None else {"kvrelay.store.transport": transport}
    bytes_moved = {"kvrelay.store.bytes": sent}
    assert put == {"kvrelay.blocks.asked": 2, "kvrelay.blocks.stored": 2, **bytes_moved, **moved}
    assert got == {"kvrelay.blocks.asked": 2, "kvrelay.blocks.found": 2, **bytes_moved, **moved}
    reason = {"kvrelay.missed.reason": "unknown" if transport is None else "never_stored"}
    found = {"kvrelay.blocks.asked": 4, "kvrelay.blocks.found": 2}
    assert looked_up == {**found, **bytes_moved, **reason}


async def test_calls_to_redis_are_spans(spans: Collector, redis_server: Server) -> None:
    """Redis itself makes none."""
    url = f"redis://{redis_server.address}"
    store = connect(f"{url}?prefix={PREFIX}")
    use(store)
    store.close()
    calls, every = below(spans)
    check_calls(calls, url, None)
    assert not every


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_calls_of_a_leg_are_its_children(spans: Collector, transport: str) -> None:
    with service(spans) as url:
        store = connect(f"{url}?transport={transport}")
        use(store)
        store.close()
    calls, every = below(spans)
    check_calls(calls, url, transport)
    assert {span.kind for span in every} == {"server"}
    assert not any("error.type" in span.attributes for span in every)
    moved = {"grpc": ["Reserve", "Put", "Get"], "socket": ["Reserve", "Locate"], "shm": []}
    names = Counter(span.name for span in every if span.name != "GetTransports")
    assert names == Counter(["Lookup", *moved[transport]])
    looked_up = only(every, "Lookup")
    assert looked_up["kvrelay.blocks.asked"] == 4
    assert looked_up["kvrelay.blocks.found"] == 2
    assert looked_up["kvrelay.missed.reason"] == "never_stored"
    assert int(str(looked_up["kvrelay.store.bytes"])) > 2 * LARGE
    if transport != "shm":
        assert only(every, "Reserve") == {"kvrelay.blocks.reserved": 2}
    if transport == "grpc":
        assert only(every, "Put") == {"kvrelay.blocks.stored": 2}
        assert only(every, "Get")["kvrelay.store.bytes"] == looked_up["kvrelay.store.bytes"]
    if transport == "socket":
        located = only(every, "Locate")
        assert located["kvrelay.blocks.asked"] == located["kvrelay.blocks.found"] == 2


async def test_calls_to_several_stores_belong_to_the_leg(spans: Collector) -> None:
    """They are made by threads of their own."""
    with service(spans) as one, service(spans) as two:
        store = connect(f"{one},{two}")
        small = make(100)
        with tracing.serving("leg", ()) as leg, tracing.under(leg):
            store.put([offer(small)], TIMEOUT)
            store.lookup(NameQuery([name_of(small), b"a" * 32]), TIMEOUT)
        store.close()
    calls, every = below(spans)
    assert sorted(call.name for call in calls) == ["store put", "store survey", "store survey"]
    asked = {call.attributes["kvrelay.store.url"] for call in calls if call.name == "store survey"}
    assert asked == {one, two}
    assert [span.name for span in every].count("Lookup") == 2
    assert only(every, "PutSmall") == {"kvrelay.blocks.stored": 1}


async def test_a_wait_for_the_disk_is_a_span(spans: Collector, tmp_path: Path) -> None:
    blocks = [make(LARGE) for _ in range(6)]
    with service(spans, f"--disk={tmp_path}", "--budget=1MiB") as url:
        store = connect(f"{url}?transport=grpc")
        with tracing.serving("leg", ()) as leg, tracing.under(leg):
            for block in blocks:
                store.put([offer(block)], TIMEOUT)
                written(store)
            for block in blocks:
                get(store, block)
        store.close()
    _, every = below(spans)
    gets = {span.id for span in every if span.name == "Get"}
    waits = [span for span in every if span.name == "disk"]
    assert waits
    assert {wait.parent for wait in waits} <= gets


async def test_a_span_ends_with_a_reader_that_leaves_or_is_refused(spans: Collector) -> None:
    with service(spans) as url:
        store = connect(f"{url}?transport=grpc")
        offers = chain(8, LARGE)
        wants = [Want(one.name, memoryview(bytearray(LARGE)), heads=4) for one in offers]
        with tracing.serving("leg", ()) as leg, tracing.under(leg):
            store.put(offers, TIMEOUT)
            with closing(store.get(wants, TIMEOUT)) as arriving:
                next(arriving)  # the reader stops: the block is verified again
            with pytest.raises(Exception, match="names"):
                store.lookup(NameQuery([b"short"]), TIMEOUT)
        await asyncio.to_thread(store.close)
    calls, every = below(spans)
    errors = {call.name: call.attributes.get("error.type") for call in calls}
    assert errors == {"store put": None, "store get": "cancelled", "store lookup": "Rejected"}
    assert only(calls, "store get")["kvrelay.blocks.found"] == 1
    ended = {span.name: span.attributes.get("error.type") for span in every}
    assert ended["Lookup"] == "Rejected"
    assert ended["Recheck"] is None
    assert ended["Get"] in ("cancelled", None)  # None: all messages were sent before it left
    assert int(str(only(every, "Get")["kvrelay.store.bytes"])) > LARGE
