"""Random lives of requests at a connector whose store fails, flips bits and is late.

Every load and save ends once, valid bytes are right, and at the end nothing is open: no lease, no
lookup, no bytes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from kvrelay.connector.context import ConnectorOptions
from kvrelay.engine.core.external import Load, Loaded, Saved
from kvstore import Lease
from kvstore.client.memory import MemoryStore
from tests.connector.rig import B, Stage, Worker, blocks_for

OPTIONS = ConnectorOptions(
    lookup_seconds=0.05,
    lookup_queue_seconds=0.2,
    retry_seconds=0.01,
    lookup_threads=2,
    load_threads=2,
    batch_bytes=600,
)
STEPS = 60
REQUESTS = 6
CAPACITY = 8  # blocks of a request


class ReleasingStage(Stage):
    """A lease whose release failed would end by its deadline: here none fails."""

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        MemoryStore.release(self, leases, timeout)


class Lives:
    """One worker, its requests, and what came of their loads and saves."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.stage = ReleasingStage()
        self.stage.failing = lambda: self.wild and chance.random() < 0.15
        self.stage.flip = self.flip
        self.wild = True
        self.worker = Worker(self.stage, OPTIONS, host=chance.random() < 0.5)
        base = [chance.randrange(50) for _ in range(CAPACITY * B)]
        ends = [chance.randrange(2, len(base)) for _ in range(REQUESTS)]
        self.prompts = [[*base[:end], chance.randrange(50)] for end in ends]
        self.loads: dict[tuple[str, int], tuple[Load, list[int]]] = {}
        self.given_back: dict[tuple[str, int], bytes] = {}  # their blocks when they were cancelled
        self.busy: Counter[int] = Counter()  # requests whose blocks a load may write
        self.ends: Counter[tuple[str, int, bool]] = Counter()
        self.saves: set[tuple[str, int]] = set()

    def flip(self, index: int) -> bool:
        """Called for each block that is read: some take a while, some are wrong."""
        time.sleep(self.chance.choice((0.0, 0.0, 0.003)))
        return self.wild and self.chance.random() < 0.1

    def step(self) -> None:
        number = self.chance.randrange(REQUESTS)
        act = self.chance.choice([self.look_up, self.look_up, self.save, self.cancel, self.leave])
        act(number)
        if self.chance.random() < 0.3:
            time.sleep(self.chance.random() * 0.004)
        self.poll()

    def look_up(self, number: int) -> None:
        """Look up, and load what was found, unless a load of the request is still under way."""
        tokens = self.prompts[number]
        local = self.chance.randrange(len(tokens) // B + 1) * B
        found = self.worker.connector.lookup(self.worker.query(str(number), tokens, local))
        external = min(found or 0, len(tokens) - 1 - local)
        if external > 0 and not self.busy[number]:
            blocks = blocks_for(external, first=number * CAPACITY)
            self.busy[number] += 1
            load = self.worker.load(str(number), tokens, local, external, blocks)
            self.loads[load.request_id, load.epoch] = (load, blocks)

    def find(self, number: int) -> None:
        """Look up until there is an answer, and load nothing."""
        query = self.worker.query(str(number), self.prompts[number])
        self.worker.until(lambda: self.worker.connector.lookup(query) is not None)

    def save(self, number: int) -> None:
        if self.busy[number]:
            return
        tokens = self.prompts[number]
        blocks = blocks_for(len(tokens), first=number * CAPACITY)
        self.worker.fill(tokens, blocks)
        save = self.worker.save(str(number), tokens, blocks)
        self.saves.add((save.request_id, save.epoch))
        self.busy[number] += 1  # its bytes stay until they were read

    def cancel(self, number: int) -> None:
        for request_id, epoch in list(self.loads):
            if request_id == str(number) and self.worker.connector.cancel(request_id, epoch):
                _, blocks = self.loads[request_id, epoch]
                self.given_back[request_id, epoch] = self.bytes_of(blocks)

    def bytes_of(self, blocks: list[int]) -> bytes:
        return b"".join(bytes(self.worker.pool.read(block, B)) for block in blocks)

    def leave(self, number: int) -> None:
        self.worker.connector.release(str(number))

    def poll(self) -> None:
        for event in self.worker.connector.poll():
            self.ends[event.request_id, event.epoch, isinstance(event, Loaded)] += 1
            self.busy[int(event.request_id)] -= 1
            if isinstance(event, Loaded):
                load, blocks = self.loads.pop((event.request_id, event.epoch))
                before = self.given_back.pop((event.request_id, event.epoch), None)
                assert before in (None, self.bytes_of(blocks))  # cancelled: no byte came after
                assert 0 <= event.valid <= load.external
                end = load.local + event.valid
                whole = blocks[: -(-event.valid // B)]
                assert self.worker.holds(load.tokens, load.local, end, whole)
                assert sum(count for _, count in event.sources) >= event.valid
            else:
                assert isinstance(event, Saved)
                self.saves.remove((event.request_id, event.epoch))

    def end(self) -> None:
        self.wild = False
        for number in range(REQUESTS):
            self.leave(number)

        def quiet() -> bool:
            self.poll()
            return not self.loads and not self.saves and self.worker.idle

        self.worker.until(quiet)
        for number in range(REQUESTS):
            self.find(number)
            self.save(number)
        self.worker.until(quiet)
        assert self.stage.stats(1.0).leases == 0, "a request that saves needs its lookup no longer"
        assert set(self.ends.values()) <= {1}
        assert self.worker.counters.crashes == 0
        self.worker.connector.close()


@pytest.mark.parametrize("seed", range(12))
def test_every_life_ends_and_leaves_nothing_open(seed: int) -> None:
    lives = Lives(random.Random(seed))
    for _ in range(STEPS):
        lives.step()
    lives.end()
