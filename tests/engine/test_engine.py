"""A fault inside a step ends its own requests and no other; no block stays held."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kvrelay.connector.none import NoConnector
from kvrelay.engine.core.external import Connector, Load, Query, Save, TransferEvent
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import (
    Admitted,
    Failed,
    Foresee,
    Sampled,
    Token,
    Update,
    Work,
)
from kvrelay.engine.engine import Engine, EngineOptions
from kvrelay.engine.stepping import DeviceLost
from kvrelay.errors import Rejected, Unavailable
from kvrelay.sampling import Sampling
from tests.engine.fakes import LIMITS, ChainRunner, Traced, answer, naming


class NoText:
    """Stop strings over a token that has no text."""

    def stops_at(self, token: int) -> bool:
        raise ValueError(f"no text for {token}")


class Breaking(ChainRunner):
    """Fails in the step in which a prompt of this length is computed, once."""

    def __init__(self, length: int) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size)
        self.length: int | None = length

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        if any(len(work.tokens) == self.length for work in works):
            self.length = None
            raise RuntimeError("the model broke")
        return super().execute(works, foresee)


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


class Turned:
    """An engine without its thread: the test takes its turns. ``updates`` are all, by request."""

    def __init__(self, runner: ChainRunner, connector: Connector | None = None) -> None:
        self.updates: dict[str, list[Update]] = {}
        outside = connector or NoConnector()
        options = EngineOptions(max_waiting=8)
        self.engine = Engine(runner, LIMITS, naming(), outside, self._deliver, options)

    def submit(
        self,
        name: str,
        prompt: list[int],
        text: NoText | None = None,
        trace: Traced | None = None,
    ) -> None:
        order = Order(name, tuple(prompt), len(prompt), 6)
        self.engine.submit(order, Sampling(), text, trace=trace)

    def run(self) -> None:
        """Take turns until nothing is left to compute."""
        for _ in range(100):
            self.engine.turn()
        findings = self.engine.audit()
        self.engine.turn()
        assert findings.result() == []
        load = self.engine.load()
        assert (load.running, load.waiting, load.held_blocks) == (0, 0, 0)

    def tokens(self, name: str) -> list[int]:
        updates = self.updates[name]
        return [update.sampled.token for update in updates if isinstance(update, Token)]

    def _deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        for request_id, update in updates:
            self.updates.setdefault(request_id, []).append(update)


@pytest.mark.parametrize("call", ["lookup", "why", "load", "save", "release", "poll"])
def test_a_connector_that_breaks_is_a_miss(call: str) -> None:
    """In the middle of an admission too: every request has its answer, no block stays held."""
    connector = Raising(call)
    turned = Turned(ChainRunner(LIMITS.num_blocks, LIMITS.block_size), connector)
    prompts = {f"r{n}": [n, *range(20 + n, 28 + n)] for n in range(4)}
    for name, prompt in prompts.items():
        turned.submit(name, prompt)
    turned.run()
    assert connector.broken > 1
    for name, prompt in prompts.items():
        assert turned.tokens(name) == answer(prompt, 6)


def test_a_token_without_text_ends_its_request_alone() -> None:
    turned = Turned(ChainRunner(LIMITS.num_blocks, LIMITS.block_size))
    turned.submit("good", [1, 2, 3])
    turned.submit("bad", [4, 5, 6], NoText())
    turned.run()
    assert turned.tokens("good") == answer([1, 2, 3], 6)
    assert [type(update) for update in turned.updates["bad"]] == [Admitted, Failed]


BAD = [1, 2, 3, 4, 5]


class Tokenless(ChainRunner):
    """Has no token for "bad" at this length, as where its grammar becomes too complex."""

    def __init__(self, length: int) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size)
        self.length = length

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        sampled = super().execute(works, foresee)
        for number, work in enumerate(works):
            if work.tokens[0] == BAD[0] and work.start + work.count == self.length:
                sampled[number] = Sampled(0, error=Rejected("grammar", "is too complex"))
        return sampled


@pytest.mark.parametrize(("generated", "prefill_only"), [(0, False), (0, True), (3, False)])
def test_a_token_that_was_not_possible_is_not_counted(generated: int, prefill_only: bool) -> None:
    """One more was counted, and a leg that failed at its first token counted as handed over."""
    turned = Turned(Tokenless(len(BAD) + generated))
    order = Order("bad", tuple(BAD), len(BAD), 6, prefill_only=prefill_only)
    turned.engine.submit(order, Sampling())
    turned.submit("good", [6, 7])
    turned.run()
    assert turned.tokens("good") == answer([6, 7], 6)
    assert turned.tokens("bad") == answer(BAD, 6)[:generated]
    last = turned.updates["bad"][-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Rejected)
    totals = turned.engine.load().totals
    assert totals.generated == 6 + generated
    assert totals.executed == len(BAD) + generated + 2 + 5
    assert totals.finished == {"length": 1, "abort": 1}


def test_a_model_that_breaks_ends_the_requests_of_its_step() -> None:
    turned = Turned(Breaking(5))
    turned.submit("in the step", [1, 2, 3, 4, 5])
    turned.run()
    turned.submit("after it", [7, 8])
    turned.run()
    assert [type(update) for update in turned.updates["in the step"]] == [Admitted, Failed]
    assert turned.tokens("after it") == answer([7, 8], 6)


class Losing(ChainRunner):
    """Its device reports an error that stays."""

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_ends_the_engine() -> None:
    """Every later step would fail too: the process must be started again."""
    lost = threading.Event()
    updates: list[Update] = []
    options = EngineOptions(on_fatal=lost.set)
    engine = Engine(
        Losing(LIMITS.num_blocks, LIMITS.block_size),
        LIMITS,
        naming(),
        NoConnector(),
        lambda made: updates.extend(update for _, update in made),
        options,
    )
    engine.start()
    engine.submit(Order("a", (1, 2, 3), 3, 6), Sampling())
    assert lost.wait(60)
    engine.close()
    last = updates[-1]
    assert isinstance(last, Failed)
    assert "the worker is stopping" in str(last.error)
    with pytest.raises(Unavailable):
        engine.submit(Order("b", (1, 2, 3), 3, 6), Sampling())


class Endless(NoConnector):
    """Promises all; its loads never end, and can be cancelled or not."""

    def __init__(self, cancels: bool | None) -> None:
        super().__init__()
        self.cancels = cancels
        self.asked: list[tuple[str, int]] = []

    def lookup(self, query: Query) -> int:
        return 99

    def load(self, load: Load) -> None:
        pass

    def cancel(self, request_id: str, epoch: int) -> bool:
        self.asked.append((request_id, epoch))
        if self.cancels is None:
            raise RuntimeError("cancel broke")
        return self.cancels


@pytest.mark.parametrize(("cancels", "held"), [(True, 0), (False, 3), (None, 3)])
def test_an_aborted_request_returns_its_blocks_at_once_if_its_load_is_cancelled(
    cancels: bool | None, held: int
) -> None:
    """A connector that breaks may still write: the blocks stay held."""
    connector = Endless(cancels)
    turned = Turned(ChainRunner(LIMITS.num_blocks, LIMITS.block_size), connector)
    turned.submit("r", list(range(3 * LIMITS.block_size)))
    turned.engine.turn()
    assert turned.engine.load().loading == 1
    turned.engine.abort("r")
    turned.engine.turn()
    assert connector.asked == [("r", 1)]
    assert turned.engine.load().held_blocks == held
    findings = turned.engine.audit()
    turned.engine.turn()
    assert findings.result() == []


def test_a_load_that_did_not_start_holds_no_blocks_after_its_step_failed() -> None:
    """The step breaks before the connector hears of the load: it will never say that it ended."""
    connector = Endless(True)
    turned = Turned(ChainRunner(LIMITS.num_blocks, LIMITS.block_size), connector)
    turned.submit("r", list(range(3 * LIMITS.block_size)))
    turned.engine._legs.note_admission = None  # type: ignore[assignment, method-assign]
    turned.engine.turn()
    assert isinstance(turned.updates["r"][-1], Failed)
    assert turned.engine.load().held_blocks == 0


class Watching(NoConnector):
    """Records the trace under which each call is made; lookups are answered ``later`` times."""

    def __init__(self, trace: Traced, later: int, tokens: int = 0) -> None:
        super().__init__()
        self.trace = trace
        self.later = later
        self.tokens = tokens
        self.calls: dict[str, set[int]] = {}

    def lookup(self, query: Query) -> int | None:
        self.calls.setdefault("lookup", set()).add(self.trace.depth)
        self.later -= 1
        return None if self.later >= 0 else self.tokens

    def load(self, load: Load) -> None:
        self.calls.setdefault("load", set()).add(self.trace.depth)

    def save(self, save: Save) -> None:
        self.calls.setdefault("save", set()).add(self.trace.depth)
        super().save(save)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("phase", ["lookup", "load", "compute"])
def test_an_aborted_leg_tells_its_trace_how_far_it_came(phase: str) -> None:
    trace = Traced()
    connector = Watching(trace, 99 if phase == "lookup" else 0, 4 if phase == "load" else 0)
    turned = Turned(ChainRunner(LIMITS.num_blocks, LIMITS.block_size), connector)
    turned.submit("a", PROMPT, trace=trace)
    turned.submit("other", [7, *PROMPT])  # without a trace
    for _ in range(3):
        turned.engine.turn()
    begun = time.monotonic()
    turned.engine.abort("a")
    turned.engine.turn()
    ((account, now),) = trace.accounts
    assert begun <= now <= time.monotonic()
    queue, load, run, rest = trace.phases
    assert (queue > 0, load > 0, run + rest > 0) == {
        "lookup": (True, False, False),
        "load": (True, True, False),
        "compute": (True, False, True),
    }[phase]
    assert account.tokens.generated == (3 if phase == "compute" else 0)
    assert account.tokens.executed == (len(PROMPT) + 2 if phase == "compute" else 0)
    if phase == "lookup":
        assert account.timing.lookup is not None
        assert account.timing.lookup[1] == now
    wanted = {"lookup", "load"} if phase == "load" else {"lookup"}
    assert wanted <= connector.calls.keys()
    assert all(depths == {0, 1} for depths in connector.calls.values())  # ``other`` calls outside
    turned.engine.abort("other")
    turned.engine.turn()
    assert len(trace.accounts) == 1


def test_a_leg_of_a_step_that_broke_tells_its_trace_and_a_refused_one_has_none() -> None:
    turned = Turned(Breaking(5))
    broken, refused, whole = Traced(), Traced(), Traced()
    turned.submit("broken", [1, 2, 3, 4, 5], trace=broken)
    turned.submit("refused", list(range(LIMITS.max_model_len)), trace=refused)
    turned.run()
    turned.submit("whole", [7, 8], trace=whole)
    turned.run()
    assert broken.phases[0] >= 0
    assert refused.accounts == whole.accounts == []


def test_a_closed_engine_tells_the_traces_of_open_legs() -> None:
    runner, trace = ChainRunner(LIMITS.num_blocks, LIMITS.block_size), Traced()
    admitted = threading.Event()

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        admitted.set()

    connector = Watching(trace, 1 << 30)
    engine = Engine(runner, LIMITS, naming(), connector, deliver)
    engine.start()
    engine.submit(Order("a", tuple(PROMPT), len(PROMPT), 6), Sampling(), trace=trace)
    engine.submit(Order("b", tuple(range(LIMITS.max_model_len)), 64, 6), Sampling())
    assert admitted.wait(60)  # the second was refused, so the first is there
    engine.close()
    assert len(trace.accounts) == 1
