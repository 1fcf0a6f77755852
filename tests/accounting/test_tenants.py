"""Requests of two tenants in one pool and one store: neither finds what the other left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Query
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.scheduler import Scheduler
from kvrelay.worker.engines.native import naming_of
from kvstore import connect
from kvstore.client.memory import forget
from tests.connector.rig import B, Worker, blocks_for

FLEET = Namespace("m", "r", "float32", "layout", 4)
ALICE, BOB = (FLEET.of_tenant(salt * 32).digest for salt in (b"a", b"b"))
PROMPT = tuple(range(50, 63))


def local_hits(scheduler: Scheduler, request_id: str, space: bytes) -> int:
    """Submits the prompt, runs it to its first token, and tells what it found here."""
    order = Order(request_id, PROMPT, len(PROMPT), 1, save=False, space=space)
    request = scheduler.submit(order)
    while scheduler.requests:
        plan = scheduler.schedule()
        scheduler.commit(plan, [7 if entry.samples else None for entry in plan.entries])
    return request.all_runs[0].admission.local


def test_the_pool_of_a_worker() -> None:
    limits = EngineLimits(
        num_blocks=32, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16
    )
    asked: set[bytes] = set()

    def lookup(query: Query) -> int:
        asked.add(query.space)
        return 0

    scheduler = Scheduler(limits, naming_of(Namer(FLEET)), lookup)
    assert [local_hits(scheduler, f"a{n}", ALICE) for n in range(2)] == [0, 12]
    assert [local_hits(scheduler, f"b{n}", BOB) for n in range(2)] == [0, 12]
    assert [local_hits(scheduler, f"n{n}", b"") for n in range(2)] == [0, 12]
    assert local_hits(scheduler, "a again", ALICE) == 12
    assert asked == {ALICE, BOB, b""}


def test_an_engine_without_tenants_serves_none() -> None:
    naming = Naming(b"root", lambda parent, tokens: parent + bytes(tokens))
    with pytest.raises(RuntimeError, match="tenants"):
        naming.of(ALICE)


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    """Two workers at one store."""
    name = "memory://tenants"
    pair = Worker(connect(name)), Worker(connect(name))
    yield pair
    for worker in pair:
        worker.connector.close()
        assert worker.idle
    forget("tenants")


@pytest.mark.parametrize("length", [B - 1, B, 2 * B + 1])
def test_the_store(workers: tuple[Worker, Worker], length: int) -> None:
    saver, reader = workers
    tokens = list(range(100, 100 + length))
    blocks = blocks_for(length, 40)
    saver.fill(tokens, blocks)
    saver.save("saver", tokens, blocks, space=ALICE)
    saver.event()
    longer = [*tokens, 9]
    for space, found in ((BOB, 0), (b"", 0), (ALICE, length)):
        name = f"reader {space.hex()}"
        assert reader.ask(name, longer, space=space) == found
        if found:
            into = blocks_for(length, 10)
            reader.load(name, longer, 0, found, into, space=space)
            reader.event()
            assert reader.holds(tokens, 0, length, into)
        reader.connector.release(name)
