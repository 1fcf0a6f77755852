"""Both sides of the connector between a vLLM without vLLM and a store: hits, failures, holds."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypedDict, Unpack

import pytest

from kvrelay.engine.core.audit import Finding
from kvrelay.engine.vllm.kv.account import RequestAccount
from kvrelay.engine.vllm.kv.audit import account_findings
from kvrelay.errors import Unavailable
from kvrelay.usage import Miss
from kvstore import Store
from kvstore.client.memory import MemoryStore
from tests.cluster.processes import until
from tests.connector.rig import Stage
from tests.engine.vllm.rig import B, FakeRequest, FakeVllm
from tests.kvstore.rig import TIMEOUT

Make = Callable[..., FakeVllm]
PROMPT = list(range(1, 24))  # five blocks and three tokens


class VllmOptions(TypedDict, total=False):
    """Of ``FakeVllm``."""

    blocks: int
    heads: int
    ranks: int
    budget: int
    patience: float


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def engine(stage: Stage) -> Iterator[Make]:
    """Makes engines that share the blocks of the stage."""
    engines: list[FakeVllm] = []

    def make(
        store: Callable[[], Store] = lambda: stage, **options: Unpack[VllmOptions]
    ) -> FakeVllm:
        engines.append(FakeVllm(store, **options))
        return engines[-1]

    yield make
    stage.go.set()
    for one in engines:
        assert not list(findings(one))
        one.close()


def findings(engine: FakeVllm) -> Iterator[Finding]:
    yield from engine.side.audit()
    for name, account in engine.accounts.items():
        yield from account_findings(name, account)


def served(engine: FakeVllm, request: FakeRequest) -> RequestAccount:
    engine.run(request)
    return engine.accounts[request.request_id]


def test_what_one_engine_computed_another_loads(engine: Make) -> None:
    one, two = engine(), engine()
    cold, warm = one.add(PROMPT), None
    assert served(one, cold).external == 0
    warm = two.add(PROMPT)
    account = served(two, warm)
    assert (account.local, account.external, account.computed) == (0, 20, 3)
    assert sum(account.sources.values()) == 20
    assert account.recomputed == account.failed == 0
    assert two.outputs[warm.request_id] == one.outputs[cold.request_id]


def test_a_local_hit_and_the_store_together(engine: Make) -> None:
    one, two = engine(), engine()
    served(one, one.add(PROMPT))
    served(two, two.add(PROMPT[:9], max_tokens=1))
    account = served(two, two.add(PROMPT))
    assert (account.local, account.external, account.computed) == (8, 12, 3)


def test_the_last_position_is_always_computed(engine: Make) -> None:
    one, two = engine(), engine()
    served(one, one.add(PROMPT[:20]))
    account = served(two, two.add(PROMPT[:20]))
    assert (account.external, account.computed) == (19, 1)


def test_a_partial_tail_is_handed_over(engine: Make) -> None:
    one, two = engine(), engine()
    params = {"kvrelay": {"save_tail": True}}
    prefill = served(one, one.add(PROMPT, max_tokens=1, kv_transfer_params=params))
    assert prefill.saved == len(PROMPT)
    first = next(iter(one.outputs.values()))
    decode = served(two, two.add([*PROMPT, *first], max_tokens=3))
    assert (decode.external, decode.computed) == (23, 1)
    names = [shard.namer.chain(PROMPT, B)[-1] for shard in one.side._shards]
    assert prefill.last_name == one.side._shards[0].namer.child(names[0], PROMPT[20:])


def test_a_flipped_bit_is_a_miss(engine: Make, stage: Stage) -> None:
    one, two = engine(), engine()
    cold = one.add(PROMPT)
    served(one, cold)
    stage.flip = lambda index: index == 2
    warm = two.add(PROMPT)
    account = served(two, warm)
    assert (account.external, account.failed) == (8, 12)
    assert account.missed is not None
    assert account.missed.reason is Miss.FAILED_VERIFICATION
    assert two.outputs[warm.request_id] == one.outputs[cold.request_id]


def test_after_a_failed_load_one_more_question(engine: Make, stage: Stage) -> None:
    """Nothing of the first load was right, so the request has no block and asks again, once."""
    one, two = engine(), engine()
    served(one, one.add(PROMPT))
    asked = len(stage.lookups)
    stage.flip = lambda index: index == 0
    account = served(two, two.add(PROMPT))
    assert len(stage.lookups) == asked + 2
    assert account.external == 0
    assert account.failed >= 20
    assert account.executed == account.computed + 3


def test_a_store_that_fails_is_a_miss(engine: Make, stage: Stage) -> None:
    one = engine()
    stage.error = Unavailable("as told")
    account = served(one, one.add(PROMPT))
    assert (account.external, account.saved) == (0, 0)
    assert account.missed is not None
    assert account.missed.reason is Miss.UNREACHABLE


def test_a_request_that_waits_for_a_lookup_lets_others_pass(engine: Make, stage: Stage) -> None:
    one = engine()
    served(one, one.add(PROMPT))
    stage.stall()
    waiting = one.add([7, *PROMPT])
    skips = one.add(PROMPT[:9], kv_transfer_params={"kvrelay": {"skip": True}})
    while skips.request_id in one.side.tracks:
        one.step()
    assert waiting.request_id in one.side.tracks
    stage.go.set()
    assert served(one, waiting).executed == 27


def test_a_new_request_does_not_miss_the_step_of_others(engine: Make) -> None:
    """The step waits for the answer to its first question, though it has others to compute."""
    one = engine(patience=TIMEOUT)
    first = one.add(PROMPT[:3], max_tokens=9)
    one.step()
    second = one.add([7, *PROMPT[:2]])
    one.step()
    assert one.running == [first, second]
    one.run(first, second)


def test_a_burst_of_new_requests_holds_up_a_step_once(stage: Stage) -> None:
    """Their waits are bounded together: three of two seconds each use up the five."""
    clock = itertools.count(0.0, 2.0)
    one = FakeVllm(lambda: stage, patience=5.0, clock=clock.__next__)
    burst = [one.add([number, *PROMPT]) for number in range(8)]
    for request in burst:
        one.side.look_up(request, 0)
    assert next(clock) <= 12.0  # read before and after each wait
    one.close()


def test_what_is_saved_holds_a_reference(engine: Make, stage: Stage) -> None:
    one = engine()
    stage.go.clear()
    request = one.add(PROMPT, kv_transfer_params={"kvrelay": {"skip": False}})
    request.skip_reading_prefix_cache = True
    one.side.tracks[request.request_id].looks = False
    while request.request_id in one.side.tracks:
        one.step()
    held = [block for block in one.manager.block_pool.blocks if block.ref_cnt]
    assert len(held) == 6
    assert one.side.busy
    assert not one.side.audit()
    stage.go.set()
    one.run(request)
    assert not [block for block in one.manager.block_pool.blocks if block.ref_cnt]


def test_idle_steps_wait_for_a_save(engine: Make, stage: Stage) -> None:
    """They spun, and held up the thread that saves."""
    one = engine()
    (rank,) = one.ranks
    rank.side._patience = 10.0
    request = one.add(PROMPT)
    stage.failing = lambda: threading.current_thread().name.startswith("store-save") and not idle()
    waits: list[bool] = []
    news = rank.side._news
    usual = news.wait

    def wait(timeout: float | None = None) -> bool:
        waits.append(True)
        return usual(timeout)

    def idle() -> bool:
        """Hold the save until a step waits for it."""
        until(lambda: bool(waits), "an idle step waits")
        return True

    news.wait = wait  # type: ignore[method-assign]
    served(one, request)
    assert waits
    assert one.accounts[request.request_id].saved == 24


def test_aborted_in_the_middle_of_a_load(engine: Make, stage: Stage) -> None:
    """Its blocks are neither saved nor freed before the load has ended."""
    one, two = engine(), engine()
    served(one, one.add(PROMPT))
    gate = threading.Event()
    loads = "store-load"
    stage.failing = lambda: loads in threading.current_thread().name and not gate.wait(10)
    request = two.add(PROMPT)
    while request.request_id not in two.loading:
        two.step()
    saves = two.side.counters.saves
    two.abort(request)
    assert [block for block in two.manager.block_pool.blocks if block.ref_cnt]
    gate.set()
    two.run()
    assert not [block for block in two.manager.block_pool.blocks if block.ref_cnt]
    assert two.ranks[0].side.counters.saves == saves == 0
    assert two.accounts[request.request_id].runs == ()


def test_preempted_and_resumed(engine: Make) -> None:
    one = engine()
    request = one.add(PROMPT, max_tokens=9)
    while request.num_tokens < len(PROMPT) + 5:
        one.step()
    one.forget()
    one.wait_for_saves()
    one.preempt(request)
    account = served(one, request)
    assert account.preemptions == 1
    assert (account.local, account.external, account.computed) == (0, 0, 23)
    second = account.runs[1].admission
    assert second.length == len(PROMPT) + 5
    assert second.external == 24
    assert account.recomputed == account.runs[0].frontier - second.hit


def test_salts_separate(engine: Make) -> None:
    one, two = engine(), engine()
    served(one, one.add(PROMPT, cache_salt="ab" * 32))
    assert served(two, two.add(PROMPT)).external == 0
    two.forget()
    assert served(two, two.add(PROMPT, cache_salt="any other text")).external == 0
    two.forget()
    assert served(two, two.add(PROMPT, cache_salt="ab" * 32)).external == 20


@pytest.mark.parametrize("field", ["lora_request", "mm_features", "prompt_embeds", "resumable"])
def test_kv_that_tokens_do_not_decide_stays_here(engine: Make, field: str) -> None:
    one, two = engine(), engine()
    served(one, one.add(PROMPT))
    request = two.add(PROMPT)
    del two.side.tracks[request.request_id]
    setattr(request, field, [1])
    two.side.add(request)
    assert served(two, request).external == 0
    assert two.ranks[0].side.counters.saves == 0


def test_without_a_store_the_accounts_remain() -> None:
    engine = FakeVllm(lambda: MemoryStore("unused"), ranks=1)
    engine.side._shards = ()
    request = engine.add(PROMPT)
    account = served(engine, request)
    assert (account.length, account.computed, account.executed) == (23, 23, 26)
    assert account.saved == 0
    engine.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_load_their_heads(engine: Make, stage: Stage, ranks: int) -> None:
    """Two ranks hold a head each; of four, two hold the same."""
    one, two = engine(ranks=ranks), engine(ranks=ranks)
    cold = one.add(PROMPT)
    served(one, cold)
    warm = two.add(PROMPT)
    account = served(two, warm)
    assert account.external == 20
    assert two.outputs[warm.request_id] == one.outputs[cold.request_id]
    other = engine()
    assert served(other, other.add(PROMPT)).external == 0, "whole blocks are others than shards"


def test_a_load_counts_only_if_every_rank_did(engine: Make, stage: Stage) -> None:
    one = engine(ranks=2)
    served(one, one.add(PROMPT))
    flips = iter([True])
    two = engine(ranks=2)
    stage.flip = lambda index: index == 3 and next(flips, False)
    account = served(two, two.add(PROMPT))
    assert (account.external, account.failed) == (12, 8)


@pytest.mark.parametrize("failing", range(2))
def test_the_shard_with_the_fewest_tokens_tells_why(
    engine: Make, stage: Stage, failing: int
) -> None:
    one = engine(ranks=2)
    served(one, one.add(PROMPT))
    broken = Stage()
    broken.error = Unavailable("as told")
    stores: list[Store] = [stage, stage, stage, stage]  # two shards, then two ranks
    stores[failing] = broken
    two = engine(iter(stores).__next__, ranks=2)
    account = served(two, two.add(PROMPT))
    assert account.external == 0
    assert account.missed is not None
    assert account.missed.reason is Miss.UNREACHABLE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_random_lives(engine: Make, stage: Stage, seed: int, ranks: int) -> None:
    """Hits, aborts, preemptions, a store that fails and lies: KV and accounts stay right."""
    numbers = random.Random(seed)
    engines = [engine(blocks=28, ranks=ranks), engine(blocks=28, ranks=ranks)]
    stage.flip = lambda index: numbers.random() < 0.03
    stage.failing = lambda: numbers.random() < 0.05
    alive: list[tuple[FakeVllm, FakeRequest]] = []
    for _ in range(150):
        one = numbers.choice(engines)
        if numbers.random() < 0.3 and len(one.waiting) < 4:
            base = [numbers.randrange(3)] * numbers.randrange(1, 20)
            tokens = base + [numbers.randrange(50) for _ in range(numbers.randrange(1, 9))]
            wishes = {"kvrelay": {"save_tail": numbers.random() < 0.5}}
            alive.append((one, one.add(tokens, numbers.randrange(1, 9), kv_transfer_params=wishes)))
        if numbers.random() < 0.1 and one.running:
            one.preempt(one.running[-1])
        if numbers.random() < 0.1 and alive:
            owner, request = alive.pop(numbers.randrange(len(alive)))
            if request.request_id in owner.side.tracks:
                owner.abort(request)
        if numbers.random() < 0.05:
            one.forget()
        one.step()
    for one in engines:
        one.run(*[request for owner, request in alive if owner is one])
        assert not [block for block in one.manager.block_pool.blocks if block.ref_cnt]
        assert not list(findings(one)), seed
        assert not one.side.tracks
        for name, account in one.accounts.items():
            if account.runs:
                told = one.admissions[name].runs[0].admission
                assert told == account.runs[0].admission
