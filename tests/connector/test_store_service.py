"""The store connector between real pools and a real service, also one that dies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kvrelay.block import Namer, Namespace
from kvrelay.connector.context import ConnectorOptions
from kvrelay.connector.store import StoreConnector
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.external import BlockContent, Load, Loaded, Query, Save, Saved
from kvstore import connect
from tests.connector.rig import WAIT, Worker, blocks_for
from tests.kvstore.conftest import kept_port, start_service, stop

SIZE = 16


def pools(dtype: str) -> tuple[KVPool, KVPool]:
    shape = PoolShape(8, 3, SIZE, 2, 4, dtype)
    one, two = KVPool(shape), KVPool(shape)
    one.tensor.copy_(torch.randn(one.tensor.shape, generator=torch.Generator().manual_seed(0)))
    return one, two


class Side:
    """A connector and its pool on one worker."""

    def __init__(self, url: str, pool: KVPool) -> None:
        space = Namespace("m", "r", pool.shape.dtype, "block-major", SIZE)
        self.pool = pool
        self.namer = Namer(space)
        self.news = threading.Event()
        self.connector = StoreConnector(connect(url), self.namer, space, pool)
        self.connector.start(self.news.set)

    def event(self) -> Loaded | Saved:
        while not (events := self.connector.poll()):
            assert self.news.wait(WAIT)
            self.news.clear()
        assert len(events) == 1
        return events[0]

    def ask(self, tokens: list[int]) -> int:
        query = Query("r", tokens, self.namer.chain(tokens, SIZE), 0)
        while (answer := self.connector.lookup(query)) is None:
            assert self.news.wait(WAIT)
            self.news.clear()
        return answer


@pytest.mark.cluster
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_goes_from_pool_to_pool(dtype: str) -> None:
    process, url = start_service("--budget=16MiB")
    one, two = pools(dtype)
    prefill, decode = Side(url, one), Side(url, two)
    try:
        for epoch, prompt in enumerate((1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 3 * SIZE + 5)):
            tokens = [epoch * 1000 + position for position in range(prompt)]
            contents, parent = [], prefill.namer.root
            for block, start in enumerate(range(0, prompt, SIZE)):
                held = tuple(tokens[start : start + SIZE])
                name = prefill.namer.child(parent, held)
                contents.append(BlockContent(block, name, parent, held))
                parent = name
            prefill.connector.save(Save("r", epoch, 0, tuple(contents)))
            assert prefill.event() == Saved("r", epoch, 0, len(contents))
            whole = [*tokens, 7]
            assert decode.ask(whole) == prompt
            names = tuple(decode.namer.chain(whole, SIZE))
            to = tuple(7 - block for block in range(len(contents)))
            decode.connector.load(Load("r", epoch, 0, prompt, tuple(whole), names, to))
            assert decode.event() == Loaded("r", epoch, prompt)
            for content, block in zip(contents, to, strict=True):
                count = len(content.tokens)
                same = one.by_position[content.block], two.by_position[block]
                assert torch.equal(*(view[:, :, :count] for view in same))
    finally:
        prefill.connector.close()
        decode.connector.close()
        stop(process)


@pytest.fixture
def port_flag() -> Iterator[str]:
    with kept_port() as flag:
        yield flag


@pytest.mark.cluster
def test_a_store_killed_under_load_and_started_again_is_used_again(port_flag: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    process, url = start_service("--budget=1MiB", port_flag)
    worker = Worker(
        connect(url), ConnectorOptions(lookup_seconds=0.5, load_seconds=1, save_seconds=1)
    )
    serial = 0

    def request() -> int:
        """One request's life; how many tokens were loaded, all of them right."""
        nonlocal serial
        serial += 1
        tokens = [source.randrange(2) for _ in range(source.randrange(2, 16))]
        blocks = blocks_for(len(tokens), 40)
        worker.fill(tokens, blocks)
        worker.save(f"s{serial}", tokens, blocks)
        assert isinstance(worker.event(), Saved)
        external = min(worker.ask(f"r{serial}", tokens), len(tokens) - 1)
        if external <= 0:
            return 0
        worker.load(f"r{serial}", tokens, 0, external, blocks_for(external))
        event = worker.event()
        assert isinstance(event, Loaded)
        assert worker.holds(tokens, 0, event.valid, blocks_for(event.valid))
        worker.connector.release(f"r{serial}")
        return event.valid

    try:
        assert sum(request() for _ in range(30)) > 0
        threading.Timer(0.05, process.kill).start()
        deadline = time.monotonic() + WAIT
        while not worker.counters.save_failures and time.monotonic() < deadline:
            request()
        assert worker.counters.save_failures
        began = time.monotonic()
        assert sum(request() for _ in range(30)) == 0
        assert time.monotonic() - began < 3
        stop(process)
        process, _ = start_service("--budget=1MiB", port_flag)
        while not request():
            assert time.monotonic() < deadline + WAIT
        assert worker.counters.crashes == 0
    finally:
        worker.connector.close()
        stop(process)
    assert worker.idle
