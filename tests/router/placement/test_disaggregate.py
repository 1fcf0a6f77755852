"""Which prompts are worth a handoff: the estimates, their sources, and the placement."""

from __future__ import annotations

import random

import pytest

from kvrelay.errors import KvrelayError
from kvrelay.v1 import router_pb2
from router.placement.costs import ComputeSite, Costs, LegTimings, LinearFit
from tests.router.fakes import answer, decode_worker, ids, prefill_worker, running
from tests.router.rig import join


def asked(prompt: list[int], seed: int = 1) -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(max_tokens=3)
    request.token_ids.ids.extend(prompt)
    request.sampling.seed = seed
    return request


LONG, SHORT = [7] * 900, [7] * 5


@pytest.mark.parametrize(
    ("mode", "short", "long"), [("always", 1, 1), ("auto", 0, 1), ("never", 0, 0)]
)
async def test_modes(mode: str, short: int, long: int) -> None:
    prefill, decode = prefill_worker(num_blocks=1000), decode_worker(num_blocks=1000)
    prefill.behaviour.pace = decode.behaviour.pace = 0.0005
    async with running([prefill, decode], disaggregate=mode) as router:
        assert ids(await router.generate(asked(SHORT))) == answer(SHORT, 3, 1)
        assert len(prefill.legs) == short
        assert ids(await router.generate(asked(LONG))) == answer(LONG, 3, 1)
        assert len(prefill.legs) == short + long


async def test_a_prompt_that_the_decode_worker_holds_stays_there() -> None:
    prefill, decode = prefill_worker(num_blocks=1000), decode_worker(num_blocks=1000)
    prefill.behaviour.pace = decode.behaviour.pace = 0.0005
    async with running([prefill, decode], disaggregate="auto") as router:
        for _ in range(3):
            assert ids(await router.generate(asked(LONG))) == answer(LONG, 3, 1)
        assert len(prefill.legs) == 1
        assert len(decode.legs) == 3


async def test_what_the_store_lost_is_not_counted_on_for_long() -> None:
    workers = [prefill_worker(num_blocks=5000), decode_worker(num_blocks=5000)]
    others = [prefill_worker("p1", num_blocks=5000), decode_worker("d1", num_blocks=5000)]
    for worker in (*workers, *others):
        worker.behaviour.pace = 0.0005
    prompts = [[first, *LONG] for first in range(16)]
    async with running(workers, disaggregate="auto") as router:
        for prompt in prompts:
            await router.generate(asked(prompt))
        assert len(workers[0].legs) == len(prompts)
        await join(router, *others)  # with empty pools, and they find nothing in the store
        await router.settled(used=2, listed=2)
        for prompt in reversed(prompts):
            await router.generate(asked(prompt))
        assert len(others[0].legs) > len(prompts) / 2
    for worker in others:
        await worker.stop()


def test_a_line_is_learnt_from_noise_and_forgets() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, line = random.Random(seed), LinearFit(0.001, 0.0005)
    for slope in (0.0001, 0.002):
        for _ in range(400):
            tokens = chance.randrange(1, 3000)
            line.add(tokens, (0.004 + slope * tokens) * chance.uniform(0.9, 1.1))
        assert line.slope == pytest.approx(slope, rel=0.15)
    assert line.at(0) == 0.0


def test_points_of_one_size_are_no_trouble() -> None:
    line = LinearFit(0.001, 0.0005)
    for _ in range(2000):
        line.add(100, 0.2)
    assert line.at(100) == pytest.approx(0.2, rel=0.01)
    assert line.slope >= 0


def test_prefers() -> None:
    costs = Costs()
    nothing = ComputeSite(0, 0, 0)
    assert costs.prefers_direct(10, nothing, nothing)
    assert not costs.prefers_direct(2000, nothing, nothing)
    assert costs.prefers_direct(2000, nothing, ComputeSite(1990, 1990, 0))
    assert costs.prefers_direct(2000, ComputeSite(0, 0, 50_000), nothing)  # a queue before prefill
    assert not costs.prefers_direct(2000, nothing, ComputeSite(0, 0, 50_000))
    assert not costs.prefers_direct(60, nothing, ComputeSite(0, 0, 0, streams=50))


def test_a_slow_transfer_and_a_fast_machine_favour_the_decode_worker() -> None:
    costs, nothing = Costs(), ComputeSite(0, 0, 0)
    for tokens in (100, 500, 1000) * 50:
        costs.learn(LegTimings(tokens, 0.00001 * tokens, tokens, 0.1 + 0.001 * tokens))
    assert costs.prefers_direct(2000, nothing, nothing)


async def test_the_log_says_why_a_decode_worker_stands_in(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        begin = "a prompt is computed by a decode worker: "
        return [line.removeprefix(begin) for line in lines if line.startswith(begin)]

    monkeypatch.setattr("router.placement.placer.LOG_SECONDS", 0.0)
    prefill, decode = prefill_worker(), decode_worker()
    async with running([prefill, decode], disaggregate="always") as router:
        await router.generate(asked(SHORT))
        assert reasons() == []
        prefill.behaviour.fail = KvrelayError("broken")
        await router.generate(asked(SHORT))
        (why,) = reasons()
        assert "broken" in why
        prefill.behaviour.fail = None
        await router.settled(used=2)
        prefill.behaviour.draining = True
        await router.settled(used=1)
        await router.generate(asked(SHORT))
        (why,) = reasons()
        assert why.startswith("no prefill worker can be used now")
        assert "draining" in why
        small = prefill_worker("p1", num_blocks=2)
        await join(router, small, decode)
        await router.settled(used=2, listed=2)
        await router.generate(asked([7] * 12))
        assert reasons() == ["no prefill worker holds 14 positions"]
        monkeypatch.setattr("router.placement.placer.LOG_SECONDS", 60.0)
        for _ in range(3):
            await router.generate(asked([7] * 12))
        assert len(reasons()) == 1, "one line, however many prompts"
        await small.stop()


async def test_a_fleet_without_prefill_workers_logs_nothing_in_auto(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running([decode_worker()], disaggregate="auto") as router:
        await router.generate(asked(SHORT))
    assert "decode worker" not in "\n".join(
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )
