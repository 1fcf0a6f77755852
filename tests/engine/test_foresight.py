"""A step is planned while a device computes the one before; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from kvrelay.connector.none import NoConnector
from kvrelay.engine.attention.batch import Batch, Packer, pack
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Foresee, Sampled, Token, Update, Work
from kvrelay.engine.engine import Engine
from kvrelay.sampling import Sampling
from tests.engine.fakes import LIMITS, ChainRunner, answer, naming


class Beside(ChainRunner):
    """Its device computes beside the host: the packer knows a part of every step."""

    def __init__(self) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size)
        self.packer = Packer(LIMITS.block_size)
        self.foreseen: list[Work] = []
        self.reused = self.works = 0

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        known = {id(work) for work in self.foreseen}
        self.reused += sum(id(work) in known for work in works)
        self.works += len(works)
        assert alike(self.packer.pack(works), pack(works, self.size))
        self.foreseen = list(foresee())
        self.packer.foresee(self.foreseen)
        return super().execute(works)


def alike(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch)]
    return all(np.array_equal(*pair) for pair in pairs)


def life(seed: int, runner: ChainRunner) -> dict[str, list[int]]:
    """The tokens of random requests, some of which are aborted; every step is audited."""
    rng = random.Random(seed)
    tokens: dict[str, list[int]] = {}

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        for name, update in updates:
            if isinstance(update, Token):
                tokens.setdefault(name, []).append(update.sampled.token)

    engine = Engine(runner, LIMITS, naming(), NoConnector(), deliver)
    for number in range(40):
        if rng.random() < 0.5:
            prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 20)))
            new = rng.randint(1, 12)
            ending = frozenset(rng.sample(answer(prompt, new), rng.randint(0, 1)))
            order = Order(f"r{number}", prompt, len(prompt), new, ending)
            engine.submit(order, Sampling(temperature=0.0))
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(40)}")
        engine.turn()
        findings = engine.audit()
        engine.turn()
        assert findings.result() == []
    return tokens


def test_tokens_and_accounts_of_foreseen_steps() -> None:
    reused = works = 0
    for seed in range(40):
        runner = Beside()
        plain = ChainRunner(LIMITS.num_blocks, LIMITS.block_size)
        assert life(seed, runner) == life(seed, plain), seed
        reused += runner.reused
        works += runner.works
    assert reused > works / 3, f"{reused} of {works} works were foreseen"


def test_a_table_that_was_made_before_its_step() -> None:
    """Only that of the same work: one that is equal may have other blocks by now."""
    blocks = [3, 1]
    work = Work([1] * 7, 6, 1, blocks, 4, None)
    packer = Packer(4)
    packer.foresee([work])
    assert packer.pack([work]).blocks.tolist() == [3, 1]
    other = Work([1] * 8, 7, 1, [5, 2, 9], 4, None)
    assert packer.pack([other, work]).blocks.tolist() == [5, 2, 3, 1]
    packer.foresee([])
    blocks[:] = [8, 0]
    assert packer.pack([work]).blocks.tolist() == [8, 0]
