"""The store connector over several stores: who gave how much, and what the loss of one costs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvrelay.engine.core.external import Loaded
from kvstore.base import NameQuery
from kvstore.client.memory import forget
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from tests.connector.rig import PATIENT, B, Stage, Worker, blocks_for
from tests.connector.test_store import saved
from tests.kvstore.rig import TIMEOUT, copied

TOKENS = tuple(range(100, 100 + 5 * B + 3))


class Halves:
    """A chain of five blocks and a tail: ``near`` has those of even number, ``far`` the others."""

    def __init__(self) -> None:
        self.near = Stage()
        self.far = Stage()
        self.whole = Stage()
        self.store = MultiStore(
            [StoreBackend("near", self.near), StoreBackend("far", self.far, promote=True)]
        )
        self.worker = Worker(self.store, PATIENT)
        self._saver = Worker(self.whole)
        self.put(TOKENS)

    def put(self, tokens: tuple[int, ...]) -> None:
        saved(self._saver, tokens)
        names = [*self._saver.namer.chain(tokens, B)]
        if rest := tokens[len(names) * B :]:
            names.append(self._saver.namer.child(names[-1], rest))
        for index, name in enumerate(names):
            assert copied(self.whole, self.near if index % 2 == 0 else self.far, name)

    def load(self, tokens: tuple[int, ...], local: int, external: int) -> Loaded:
        blocks = blocks_for(external)
        self.worker.load("r", tokens, local, external, blocks)
        event = self.worker.event()
        assert isinstance(event, Loaded)
        valid = event.valid
        assert self.worker.holds(tokens, local, local + valid, blocks_for(valid))
        assert sum(count for _, count in event.sources) == valid
        return event

    def close(self) -> None:
        self._saver.connector.close()
        self.worker.connector.close()
        assert self.worker.idle
        for stage in (self.near, self.far, self.whole):
            forget(stage.name)


@pytest.fixture
def halves() -> Iterator[Halves]:
    made = Halves()
    yield made
    made.close()


@pytest.mark.parametrize("local", range(0, len(TOKENS), B))
def test_a_lead_across_stores_is_loaded_and_each_told(halves: Halves, local: int) -> None:
    tokens, prompt = (*TOKENS, 7), len(TOKENS)
    assert halves.worker.ask("r", tokens, local) == prompt - local
    event = halves.load(tokens, local, prompt - local)
    assert event.valid == prompt - local
    told = {"near": 0, "far": 0}
    for start in range(local, prompt, B):
        told["near" if start // B % 2 == 0 else "far"] += min(B, prompt - start)
    assert dict(event.sources) == {name: count for name, count in told.items() if count}


@pytest.mark.parametrize("external", range(1, len(TOKENS)))
def test_tokens_by_store_add_up_however_much_is_ordered(halves: Halves, external: int) -> None:
    halves.worker.ask("r", (*TOKENS, 7))
    assert halves.load((*TOKENS, 7), 0, external).valid in (external, external // B * B)


def test_without_a_lookup_they_are_found_all_the_same(halves: Halves) -> None:
    event = halves.load((*TOKENS, 7), 0, len(TOKENS))
    assert dict(event.sources) == {"near": 3 * B, "far": 2 * B + 3}


def test_a_store_that_is_lost_after_the_lookup_costs_its_blocks(halves: Halves) -> None:
    assert halves.worker.ask("r", (*TOKENS, 7)) == len(TOKENS)
    halves.far.failing = lambda: True
    event = halves.load((*TOKENS, 7), 0, len(TOKENS))
    assert (event.valid, event.sources) == (B, (("near", B),))
    assert halves.worker.ask("again", (*TOKENS, 7)) == B


def test_what_was_loaded_is_promoted(halves: Halves) -> None:
    halves.worker.ask("r", (*TOKENS, 7))
    halves.load((*TOKENS, 7), 0, len(TOKENS))
    assert halves.store.backends[0].writer.flush(TIMEOUT)
    assert halves.worker.ask("again", (*TOKENS, 7)) == len(TOKENS)
    event = halves.load((*TOKENS, 7), 0, len(TOKENS))
    assert dict(event.sources) in ({"near": len(TOKENS)}, {"near": 3 * B, "far": 2 * B + 3})
    halves.far.failing = lambda: True
    assert halves.worker.ask("last", (*TOKENS, 7)) == len(TOKENS)
    partial = halves.worker.namer.child(halves.worker.namer.chain(TOKENS, B)[-1], TOKENS[-3:])
    assert halves.near.survey(NameQuery([partial]), TIMEOUT).sizes != (None,)


def test_wrong_bytes_of_one_store_never_count_and_the_other_is_asked_first_then(
    halves: Halves,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    halves.far.flip = lambda index: chance.random() < 0.5
    for number in range(40):
        tokens = (*(chance.randrange(1000) for _ in range(3 * B)), 7)
        halves.put(tokens[:-1])
        found = halves.worker.ask(f"r{number}", tokens)
        assert found == 3 * B
        event = halves.load(tokens, 0, found)
        assert event.valid in (B, 3 * B)
    assert halves.worker.counters.corrupt > 0
    assert halves.store.backends[1].doubted
