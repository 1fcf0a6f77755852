"""A fault inside a step ends whom it belongs to, and nobody else; nothing stays held."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.connector.none import NoConnector
from kvrelay.engine.core.external import Connector, Load, Query, Save, TransferEvent
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Failed, Token
from kvrelay.engine.core.work import Sampled, Work
from kvrelay.engine.steps import Steps
from kvrelay.sampling import Sampling
from tests.engine.fakes import ChainRunner, answer, naming

LIMITS = EngineLimits(
    num_blocks=16, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32
)


class NoText:
    """Stop strings over a token that has no text."""

    def stops_at(self, token: int) -> bool:
        raise ValueError(f"no text for {token}")


class Breaking(ChainRunner):
    """Fails in the step in which a prompt of this length is computed, once."""

    def __init__(self, length: int) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size)
        self.length: int | None = length

    def execute(self, works: Sequence[Work]) -> list[Sampled | None]:
        if any(len(work.tokens) == self.length for work in works):
            self.length = None
            raise RuntimeError("the model broke")
        return super().execute(works)


class Raising(NoConnector):
    """One of its calls breaks, every other time; its lookups promise four tokens."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.broken = 0

    def lookup(self, query: Query) -> int:
        self._break("lookup")
        return 4

    def why(self, request_id: str) -> None:
        self._break("why")

    def load(self, load: Load) -> None:
        self._break("load")
        super().load(load)

    def save(self, save: Save) -> None:
        self._break("save")
        super().save(save)

    def release(self, request_id: str) -> None:
        self._break("release")

    def poll(self) -> list[TransferEvent]:
        self._break("poll")
        return super().poll()

    def _break(self, call: str) -> None:
        if call == self.call:
            self.broken += 1
            if self.broken % 2 == 0:
                raise RuntimeError(f"{call} broke")


def steps(runner: ChainRunner, connector: Connector | None = None) -> Steps:
    return Steps(runner, LIMITS, naming(), connector or NoConnector(), max_waiting=8)


def run(engine: Steps) -> dict[str, list[Token | Ended | Failed]]:
    """Step until nothing is left to compute; everything that was told, by request."""
    told: dict[str, list[Token | Ended | Failed]] = {}
    for _ in range(100):
        try:
            engine.step()
        except RuntimeError as error:
            engine.fail_step(error)
        for request_id, update in engine.take_updates():
            told.setdefault(request_id, []).append(update)
    assert engine.audit() == []
    load = engine.measure()
    assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)
    return told


@pytest.mark.parametrize("call", ["lookup", "why", "load", "save", "release", "poll"])
def test_a_connector_that_breaks_is_a_miss(call: str) -> None:
    """In the middle of an admission too: every request has its answer, no block stays held."""
    connector = Raising(call)
    engine = steps(ChainRunner(LIMITS.num_blocks, LIMITS.block_size), connector)
    prompts = {f"r{n}": [n, *range(20 + n, 28 + n)] for n in range(4)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt)
    told = run(engine)
    assert connector.broken > 1
    for name, prompt in prompts.items():
        assert tokens(told[name]) == answer(prompt, 6)


def submit(engine: Steps, name: str, prompt: list[int], text: NoText | None = None) -> None:
    engine.submit(Order(name, tuple(prompt), len(prompt), 6), Sampling(), text)


def tokens(told: list[Token | Ended | Failed]) -> list[int]:
    return [update.sampled.token for update in told if isinstance(update, Token)]


def test_a_token_without_text_ends_its_request_alone() -> None:
    engine = steps(ChainRunner(LIMITS.num_blocks, LIMITS.block_size))
    submit(engine, "good", [1, 2, 3])
    submit(engine, "bad", [4, 5, 6], NoText())
    told = run(engine)
    assert tokens(told["good"]) == answer([1, 2, 3], 6)
    assert [type(update) for update in told["bad"]] == [Failed]


def test_a_model_that_breaks_ends_the_requests_of_its_step() -> None:
    engine = steps(Breaking(5))
    submit(engine, "in the step", [1, 2, 3, 4, 5])
    told = run(engine)
    submit(engine, "after it", [7, 8])
    told |= run(engine)
    assert [type(update) for update in told["in the step"]] == [Failed]
    assert tokens(told["after it"]) == answer([7, 8], 6)
