"""The vLLM engine without vLLM: updates, accounts and totals over a core that steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.core.request import Finish, Order
from kvrelay.engine.core.updates import Admitted, Ended, Failed, Token, Update
from kvrelay.engine.engine import EngineOptions
from kvrelay.engine.vllm.serving.engine import VllmEngine
from kvrelay.errors import Exhausted, Rejected, Unavailable
from kvrelay.sampling import Sampling
from tests.engine.fakes import Traced
from tests.engine.vllm.stepped import LIMITS, FakeCore

WAIT = 20.0


class Turned:
    """An engine whose turns the test takes; the updates by request."""

    def __init__(self, core: FakeCore, options: EngineOptions | None = None) -> None:
        self.core = core
        self.updates: dict[str, list[Update]] = {}
        self.engine = VllmEngine(self.deliver, options)
        self.engine.attach(core, LIMITS)

    def deliver(self, updates: Sequence[tuple[str, Update]]) -> None:
        for request_id, update in updates:
            self.core.log.append(type(update).__name__)
            self.updates.setdefault(request_id, []).append(update)

    def submit(
        self,
        request_id: str,
        length: int = 5,
        tokens: int = 3,
        prefill_only: bool = False,
        trace: Traced | None = None,
    ) -> None:
        order = Order(request_id, tuple(range(length)), length, tokens, prefill_only=prefill_only)
        self.engine.submit(order, Sampling(), trace=trace)

    def ended(self, request_id: str) -> Ended:
        last = self.updates[request_id][-1]
        assert isinstance(last, Ended)
        return last

    def tokens(self, request_id: str) -> list[int]:
        return [one.sampled.token for one in self.updates[request_id] if isinstance(one, Token)]


class StopsAt:
    """Ends an output with a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def stops_at(self, token: int) -> bool:
        return token == self.token


class NoText:
    """Stop strings over a token that has no text."""

    def stops_at(self, token: int) -> bool:
        raise ValueError(f"no text for {token}")


def test_an_admission_is_delivered_before_the_step_that_computes() -> None:
    turned = Turned(FakeCore({"a": 4}))
    turned.submit("a")
    for _ in range(4):
        turned.engine.turn()
    assert turned.core.log[:3] == ["Admitted", "executed", "Token"]
    admitted = turned.updates["a"][0]
    assert isinstance(admitted, Admitted)
    assert (admitted.admission.external, dict(admitted.sources)) == (4, {"store": 4})
    tokens = turned.ended("a").tokens
    assert (tokens.length, tokens.external, tokens.computed) == (5, 4, 1)
    assert (tokens.executed, tokens.generated) == (1 + 2, 3)
    assert turned.tokens("a") == [1, 2, 3]
    assert [one.finish for one in turned.updates["a"] if isinstance(one, Token)] == [
        None,
        None,
        Finish.LENGTH,
    ]


def test_a_stop_string_ends_the_request_in_vllm_too() -> None:
    turned = Turned(FakeCore())
    turned.engine.submit(Order("a", (7, 8), 2, 9), Sampling(stop=("x",)), StopsAt(2))
    for _ in range(4):
        turned.engine.turn()
    assert turned.tokens("a") == [1, 2]
    assert turned.core.aborted == ["a"]
    assert turned.ended("a").tokens.generated == 2
    assert dict(turned.engine.load().totals.finished) == {"stop": 1}


def test_an_output_without_text_fails_alone() -> None:
    turned = Turned(FakeCore())
    turned.engine.submit(Order("a", (7, 8), 2, 9), Sampling(stop=("x",)), NoText())
    turned.submit("b")
    for _ in range(4):
        turned.engine.turn()
    assert isinstance(turned.updates["a"][-1], Failed)
    assert turned.tokens("b") == [1, 2, 3]
    assert not turned.core.requests


def test_a_prefill_leg_ends_after_its_last_save() -> None:
    turned = Turned(FakeCore())
    turned.core.saves = True
    turned.submit("p", tokens=9, prefill_only=True)
    turned.submit("d", tokens=1)
    for _ in range(3):
        turned.engine.turn()
    assert [type(one) for one in turned.updates["p"]] == [Admitted, Token]
    assert turned.ended("d").saved == 0, "a decode leg does not wait for its saves"
    turned.core.saves = False
    turned.engine.turn()
    assert turned.ended("p").saved == 5
    assert turned.engine.load().totals.finished == {"length": 1, "handoff": 1}


def test_an_aborted_request_gets_no_further_update_and_counts_what_it_computed() -> None:
    turned = Turned(FakeCore())
    turned.submit("a")
    turned.engine.turn()
    turned.engine.abort("a")
    turned.engine.abort("unknown")
    turned.engine.turn()
    assert [type(one) for one in turned.updates["a"]] == [Admitted, Token]
    totals = turned.engine.load().totals
    assert (totals.prompt, totals.generated, totals.executed) == (5, 1, 5)
    assert dict(totals.finished) == {"abort": 1}
    assert turned.engine.load().running == 0, "the load is that of now, also when nothing steps"


def test_a_matcher_that_allows_no_token_fails_its_request_with_its_error() -> None:
    turned = Turned(FakeCore())
    turned.core.errors["a"] = Rejected("sampling.structured_output", "no token")
    turned.submit("a")
    turned.engine.turn()
    last = turned.updates["a"][-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, Rejected)
    assert not turned.core.requests


def test_what_can_never_be_served_is_refused() -> None:
    turned = Turned(FakeCore(), EngineOptions(max_waiting=1))
    turned.submit("long", length=20, tokens=9)
    turned.submit("first")
    turned.submit("second")
    turned.engine.turn()
    errors = {
        name: last.error for name, (*_, last) in turned.updates.items() if isinstance(last, Failed)
    }
    assert isinstance(errors["long"], Rejected)
    assert isinstance(errors["second"], Exhausted)
    assert "first" not in errors


def test_a_step_that_fails_ends_the_process() -> None:
    """vLLM's scheduler has counted the step's positions as computed and cannot take them back."""
    ended = threading.Event()
    core = FakeCore()
    engine = VllmEngine(lambda updates: None, EngineOptions(on_fatal=ended.set))
    engine.open(lambda: (core, LIMITS))
    core.broken = RuntimeError("the model broke")
    engine.submit(Order("a", (1, 2), 2, 2), Sampling())
    assert ended.wait(WAIT)
    with pytest.raises(Unavailable):
        engine.submit(Order("b", (1, 2), 2, 2), Sampling())
    engine.close()
    assert core.closed_in == "engine"


def test_a_step_that_hangs_ends_the_process() -> None:
    ended, core = threading.Event(), FakeCore()
    core.hangs = threading.Event()
    engine = VllmEngine(lambda updates: None, EngineOptions(step_seconds=0.2, on_fatal=ended.set))
    engine.open(lambda: (core, LIMITS))
    engine.start()
    engine.submit(Order("a", (1, 2), 2, 2), Sampling())
    assert ended.wait(WAIT)
    core.hangs.set()
    engine.close()


def test_an_engine_that_cannot_open_says_why_and_leaves_no_thread() -> None:
    def refuse() -> tuple[FakeCore, object]:
        raise Rejected("dtype", "not served")

    engine = VllmEngine(lambda updates: None)
    with pytest.raises(Rejected, match="not served"):
        engine.open(refuse)  # type: ignore[arg-type]
    engine.close()
    assert not any(thread.name == "engine" for thread in threading.enumerate())


def test_closing_fails_what_is_open() -> None:
    failed = threading.Event()

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        for _, update in updates:
            if isinstance(update, Failed) and isinstance(update.error, Unavailable):
                failed.set()

    core = FakeCore()
    engine = VllmEngine(deliver)
    engine.open(lambda: (core, LIMITS))
    order = Order("a", (1, 2), 2, 1, prefill_only=True)
    core.saves = True
    engine.submit(order, Sampling())
    engine.close()
    assert failed.is_set()
    assert core.closed_in == "engine"  # ranks end with the thread that made them


def test_a_load_that_fails_between_two_steps_is_counted() -> None:
    turned = Turned(FakeCore({"a": 4, "b": 4}))
    for name in ("a", "b"):
        turned.submit(name, tokens=9)
    turned.engine.turn()
    turned.core.failed = {"a": 4, "b": 2}
    assert audited(turned) == []
    turned.core.failed["b"] = 3
    turned.engine.abort("b")
    for _ in range(12):
        turned.engine.turn()
    assert turned.ended("a").tokens.failed == 4
    assert turned.engine.load().totals.failed == 4 + 3


def test_the_audit_finds_totals_that_differ_from_the_accounts() -> None:
    turned = Turned(FakeCore())
    turned.submit("a")
    turned.engine.turn()
    assert audited(turned) == []
    turned.core.requests["a"].runs[-1][3] += 1
    assert [one.invariant for one in audited(turned)] == ["I9"]
    turned.core.findings = [Finding("I1", None, "of vLLM's pool")]
    assert [one.invariant for one in audited(turned)] == ["I1", "I9"]


def audited(turned: Turned) -> list[Finding]:
    """Between two steps: the core has nothing to do in this turn."""
    future = turned.engine.audit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCore, "busy", False)
        turned.engine.turn()
    return future.result(WAIT)


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_add_up(seed: int) -> None:
    """Preempted, aborted, handed over: every account keeps I5, and the totals are their sums."""
    chance = random.Random(seed)
    core = FakeCore({f"r{number}": chance.randrange(4) for number in range(40)})
    turned = Turned(core, EngineOptions(audit_steps=True))
    for number in range(40):
        length = chance.randrange(4, 9)
        turned.submit(
            f"r{number}", length, chance.randrange(1, 9), prefill_only=chance.random() < 0.3
        )
        core.saves = chance.random() < 0.5
        if chance.random() < 0.4:
            core.preempt.add(f"r{chance.randrange(number + 1)}")
        if chance.random() < 0.2:
            turned.engine.abort(f"r{chance.randrange(number + 1)}")
        turned.engine.turn()
    core.saves = False
    while core.busy:
        turned.engine.turn()
    sums = dict.fromkeys(("executed", "recomputed", "generated"), 0)
    for updates in turned.updates.values():
        if isinstance(updates[-1], Ended):
            tokens = updates[-1].tokens
            positions = [range(run.admission.hit, run.frontier) for run in tokens.runs]
            distinct = len(set().union(*positions))
            assert tokens.executed == sum(map(len, positions))
            assert tokens.recomputed == tokens.executed - distinct, tokens
            if len(positions) == 1:
                assert tokens.executed == tokens.computed + tokens.generated - 1
            assert tokens.local + tokens.external + tokens.computed == tokens.length
            for name in sums:
                sums[name] += getattr(tokens, name)
    totals = turned.engine.load().totals
    assert totals.adds_up
    assert totals.executed >= sums["executed"]
    assert totals.generated == sum(len(turned.tokens(name)) for name in turned.updates)
    assert sum(totals.finished.values()) == 40
    assert turned.engine.load().running == 0


def test_a_dropped_leg_tells_its_trace_how_far_it_came() -> None:
    """Aborted before its first step or later, or failed; not one that ends."""
    core = FakeCore({"later": 4})
    traces = {name: Traced() for name in ("early", "later", "failed", "ended")}
    turned = Turned(core)
    turned.submit("early", trace=traces["early"])
    turned.engine.abort("early")
    for name in ("later", "failed"):
        turned.submit(name, tokens=9, trace=traces[name])
    turned.submit("ended", tokens=1, trace=traces["ended"])
    turned.engine.turn()
    turned.engine.turn()
    turned.engine.abort("later")
    core.errors["failed"] = Rejected("response_format", "no token is possible")
    turned.engine.turn()
    assert traces["ended"].accounts == []
    queue, *rest = traces["early"].phases
    assert queue > 0
    assert rest == [0, 0, 0]
    ((later, _),) = traces["later"].accounts
    assert (later.tokens.external, later.tokens.executed, later.tokens.generated) == (4, 2, 2)
    for name in ("later", "failed"):
        _, _, run, after = traces[name].phases
        assert run > 0
        assert after > 0
