"""Spans of the store process: the calls of a traced caller, over every transport, and no others."""

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
from tests.kvstore.rig import TIMEOUT, chain, get, make, name_of, offer
from tests.otlp import Collector, Seen, collector

pytestmark = pytest.mark.cluster
LARGE = 300 << 10


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


def below(spans: Collector) -> tuple[Seen, Sequence[Seen]]:
    """The leg, and the spans of the store in its trace."""
    tracing.end()
    (leg,) = (span for span in spans.seen if span.service == "kvrelay-worker")
    every = [span for span in spans.seen if span.service == "kvrelay-store"]
    assert all(span.trace == leg.trace for span in every)
    return leg, sorted(every, key=lambda span: span.begin)


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


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_calls_of_a_leg_are_its_children(spans: Collector, transport: str) -> None:
    with service(spans) as url:
        store = connect(f"{url}?transport={transport}")
        use(store)
        store.close()
    leg, every = below(spans)
    assert {span.parent for span in every} == {leg.id}
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
    seen, every = below(spans)
    assert {span.parent for span in every} == {seen.id}
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
    _, every = below(spans)
    ended = {span.name: span.attributes.get("error.type") for span in every}
    assert ended["Lookup"] == "Rejected"
    assert ended["Recheck"] is None
    assert ended["Get"] in ("cancelled", None)  # None: all messages were sent before it left
    assert int(str(only(every, "Get")["kvrelay.store.bytes"])) > LARGE
