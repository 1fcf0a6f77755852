"""Silent, restarted and draining workers are detected; their streams continue elsewhere."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack
from typing import Literal, TypedDict

import pytest

from kvrelay.errors import DeadlineExceeded, Draining, KvrelayError, Mismatch, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.status import NothingListens
from kvrelay.v1 import router_pb2, router_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from router.workers import watch
from router.workers.health import (
    READY,
    HealthState,
    health_after_answer,
    health_after_failure,
)
from router.workers.link import GrpcLink
from router.workers.patience import MAX_FACTOR, Patience
from tests.failures.proxy import Faults, Proxy
from tests.router.fakes import (
    Behaviour,
    FakeWorker,
    Running,
    answer,
    decode_worker,
    ids,
    namespace,
    prefill_worker,
    running,
)
from tests.router.rig import PROMPT, failing, join, request, until


class Pace(TypedDict):
    """Flags of the router."""

    health_interval: float
    health_timeout: float


FAST = Pace(health_interval=0.05, health_timeout=0.15)
DEFAULT = Pace(health_interval=0.15, health_timeout=0.35)
PATIENT = Pace(health_interval=0.05, health_timeout=5.0)  # for what is not about silence


def awake() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def sleeper(boot: str, tokens: int = 3) -> tuple[FakeWorker, asyncio.Event]:
    """A decode worker that makes so many tokens and falls silent when its event is cleared."""
    event = awake()
    behaviour = Behaviour(step=asyncio.Semaphore(tokens), checks=event, tokens=event)
    return decode_worker(boot, behaviour=behaviour), event


async def states(router: Running) -> dict[str, str]:
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    listed = await stub.ListWorkers(router_pb2.ListWorkersRequest())
    return {w.address: router_pb2.WorkerState.Name(w.state) for w in listed.workers}


async def first(call: AsyncIterator[router_pb2.GenerateResponse], count: int) -> list[int]:
    """The first ``count`` tokens of a stream."""
    seen: list[int] = []
    while len(seen) < count:
        seen += ids([await anext(call)])
    return seen


async def rest(call: AsyncIterator[router_pb2.GenerateResponse]) -> list[int]:
    return ids([response async for response in call])


@pytest.mark.parametrize("pace", [DEFAULT, FAST], ids=["default", "fast"])
async def test_streams_leave_a_silent_worker(pace: Pace) -> None:
    sleeping, event = sleeper("d0")
    async with running([sleeping], **pace) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        await stand_by(router, sleeping, other := decode_worker("d1"))
        event.clear()
        begun = time.monotonic()
        seen += await first(call, 1)
        print(f"pause {time.monotonic() - begun:.3f} s")  # the bar is in docs/failures.md
        assert (await states(router))[sleeping.address] == "WORKER_STATE_SUSPECT"
        (silent,) = (w for w in router.registry.workers if w.address == sleeping.address)
        told = re.fullmatch(r"it was silent for (.+) s", str(silent.problem))
        assert told is not None
        longest = MAX_FACTOR * pace["health_timeout"]
        assert 0.99 * pace["health_timeout"] <= float(told[1]) <= 1.01 * longest  # two digits
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        await asyncio.wait_for(sleeping.cancelled.wait(), 20)  # its leg has ended
        event.set()
        await router.settled(used=2)
        assert set((await states(router)).values()) == {"WORKER_STATE_READY"}
        await other.stop()


async def stand_by(router: Running, *workers: FakeWorker) -> None:
    """List exactly these workers, and wait until all are used."""
    await join(router, *workers)
    await router.settled(used=len(workers), listed=len(workers))


@pytest.mark.parametrize("dies", [False, True], ids=["drains", "dies"])
async def test_a_stream_waits_for_a_worker_that_is_large_enough(dies: bool) -> None:
    step = asyncio.Semaphore(3)
    large = decode_worker("d0", behaviour=Behaviour(step=step))
    small = decode_worker("d1", num_blocks=4)
    async with running([large], **PATIENT) as router:
        call = aiter(router.call(request(40)))
        seen = await first(call, 3)
        await stand_by(router, large, small)
        if dies:
            await large.stop()
        else:
            large.behaviour.draining = True
        await router.settled(used=1)
        error = await failing(router.generate(request(40)))  # it may fit again, so no Rejected
        assert isinstance(error, Unavailable)
        again = decode_worker("d2")
        if dies:
            await again.start(large.address)
        else:  # it ends where it is
            for _ in range(40):
                step.release()
        assert seen + await rest(call) == answer(PROMPT, 40, 5)
        assert not small.legs
        assert large.cancelled.is_set() == dies
        await again.stop()
        await small.stop()


async def test_a_worker_that_only_makes_tokens_is_not_silent() -> None:
    checks, step = awake(), asyncio.Semaphore(0)
    busy = decode_worker("d0", num_blocks=1000, behaviour=Behaviour(checks=checks, step=step))
    spare = decode_worker("d1", max_model_len=20)  # the stream is too long for it
    async with running([busy, spare], **FAST) as router:
        (known,) = (w for w in router.registry.workers if w.address == busy.address)
        call = aiter(router.call(request(900), 120))
        checks.clear()
        seen, longest = list[int](), MAX_FACTOR * FAST["health_timeout"]
        while time.monotonic() < known.answered_check + 2 * longest:
            step.release()
            seen += await first(call, 1)
            await asyncio.sleep(0.01)
        assert known.usable
        assert seen == answer(PROMPT, len(seen), 5)
        assert len(busy.legs) == 1


async def test_who_was_silent_for_a_while_may_go_on_when_nobody_else_can() -> None:
    sleeping, event = sleeper("d0")
    async with running([sleeping], **FAST) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        for legs in range(1, 4):
            assert len(sleeping.legs) == legs
            event.clear()
            await router.settled(used=0)
            event.set()
            await router.settled(used=1)
            await until(lambda legs=legs: len(sleeping.legs) > legs)  # type: ignore[misc]
        assert sleeping.behaviour.step is not None
        for _ in range(20):
            sleeping.behaviour.step.release()
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        assert len(sleeping.legs) == 4


async def test_a_busy_worker_is_given_time() -> None:
    step = asyncio.Semaphore(3)
    slow = decode_worker("d0", behaviour=Behaviour(step=step))
    async with running([slow], health_interval=0.05, health_timeout=0.4) as router:
        call = aiter(router.call(request(), 60))
        seen = await first(call, 3)
        await stand_by(router, slow, other := decode_worker("d1"))
        (known,) = (w for w in router.registry.workers if w.address == slow.address)
        for seconds in (0.1, 0.2, 0.4, 0.8):  # the last far beyond the silence configured
            slow.behaviour.slow = seconds
            for _ in range(2):
                before = known.answered_check
                await until(lambda before=before: known.answered_check > before)  # type: ignore[misc]
        assert (await states(router))[slow.address] == "WORKER_STATE_READY"
        assert not slow.cancelled.is_set()
        for _ in range(5):
            step.release()
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        assert not other.legs
        await other.stop()


async def test_a_check_may_take_as_long_as_a_worker_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.workers.watch.LONGEST_CHECK_SECONDS", 0.1)
    slow = decode_worker("d0")
    async with running([slow], health_interval=0.01, health_timeout=30.0) as router:
        (known,) = router.registry.workers
        slow.behaviour.slow = 0.3
        before = known.health_since
        for _ in range(3):
            await router.registry.confirm(Deadline.after(30.0))
        assert known.health_since == before, "it was used all the time"


async def test_a_restart_between_two_checks_moves_its_streams() -> None:
    restarted, _ = sleeper("d0")
    async with running([restarted], **PATIENT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        await stand_by(router, restarted, other := decode_worker("d1"))
        restarted.boot = "d0-again"  # on the same connection, as behind a proxy
        restarted.behaviour = Behaviour()
        responses = [response async for response in call]
        assert seen + ids(responses) == answer(PROMPT, 8, 5)
        assert responses[-1].usage.legs[0].worker_id == "d0"  # not the one that took its place
        await asyncio.wait_for(restarted.cancelled.wait(), 20)
        await other.stop()


async def test_streams_leave_a_draining_worker_if_they_can() -> None:
    leaving, _ = sleeper("d0")
    async with running([leaving], **PATIENT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        leaving.behaviour.draining = True
        await router.settled(used=0)
        assert (await states(router))[leaving.address] == "WORKER_STATE_DRAINING"
        assert not leaving.cancelled.is_set()  # no other worker could continue
        await stand_by_draining(router, leaving, other := decode_worker("d1"))
        responses = [response async for response in call]
        assert seen + ids(responses) == answer(PROMPT, 8, 5)
        assert [leg.generated for leg in responses[-1].usage.legs] == [3, 5]
        await other.stop()


@pytest.mark.parametrize("moves", [False, True])
async def test_a_draining_worker_that_was_silent_keeps_what_fits_nowhere_else(moves: bool) -> None:
    leaving, event = sleeper("d0")
    assert leaving.behaviour.step is not None
    async with running([leaving], **DEFAULT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        leaving.behaviour.draining = True
        await router.settled(used=0)
        event.clear()
        (listed,) = router.registry.workers
        await until(lambda: listed.health.state is HealthState.SUSPECT)
        if moves:
            await stand_by_draining(router, leaving, other := decode_worker("d1"))
            assert seen + await rest(call) == answer(PROMPT, 8, 5)
            await other.stop()
            return
        event.set()
        for _ in range(5):
            leaving.behaviour.step.release()
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        assert not leaving.cancelled.is_set()


async def test_a_stream_leaves_a_draining_worker_once_it_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not at a later check, which says for how long it was silent by then."""
    caplog.set_level("WARNING", "kvrelay.router")
    leaving, event = sleeper("d0")
    async with running([leaving], **DEFAULT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        await stand_by(router, leaving, other := decode_worker("d1"))
        leaving.behaviour.draining = True
        await router.settled(used=1)
        event.clear()
        seen += await first(call, 1)
        told = [one for one in caplog.messages if f"{leaving.address} is suspect" in one]
        assert 1 <= len(told) <= 2, told  # 2 if this process stood still
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        await other.stop()


class Asked(asyncio.Event):
    """Always set; counts its waiters."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.times = 0

    async def wait(self) -> Literal[True]:
        self.times += 1
        return await super().wait()


async def test_a_silent_worker_does_not_lose_its_fleet_to_another_one() -> None:
    sleeping, event = sleeper("d0")
    async with running([sleeping], **FAST) as router:
        other = decode_worker(
            "d1", namespace=namespace(revision="s"), behaviour=Behaviour(checks=(asked := Asked()))
        )
        await join(router, sleeping, other)
        await router.settled(used=1, listed=2)
        event.clear()
        await router.settled(used=0)
        async with asyncio.timeout(10):
            before = asked.times
            while asked.times < before + 3:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        assert [w.usable for w in router.registry.workers] == [False, False]
        event.set()
        await router.settled(used=1)
        assert router.registry.workers[0].usable
        await other.stop()


async def test_streams_are_not_moved_to_one_that_leaves_as_well() -> None:
    leaving, _ = sleeper("d0")
    async with running([leaving], resume_wait=0.5, **PATIENT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        asked = asyncio.Event()
        asked.set()
        other = decode_worker("d1", behaviour=Behaviour(checks=asked))
        await stand_by(router, leaving, other)
        asked.clear()  # its answer to the next check is not known yet
        other.behaviour.draining = True
        other.behaviour.fail = Draining("leaving too")
        leaving.behaviour.draining = True
        await router.settled(used=1)
        asked.set()
        await router.settled(used=0)
        assert leaving.behaviour.step is not None
        for _ in range(5):
            leaving.behaviour.step.release()
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        assert not other.legs
        await other.stop()


async def test_a_worker_that_stays_after_all_gets_its_stream_back() -> None:
    """As after a change of role that was given up."""
    only, _ = sleeper("d0")
    async with running([only], resume_wait=5.0, **PATIENT) as router:
        only.behaviour.fail = Draining("leaving")
        only.behaviour.fail_after = 3
        call = aiter(router.call(request()))
        seen = await first(call, 3)
        await until(lambda: len(only.legs) == 2)  # it is back, and held
        only.behaviour.fail = None
        assert only.behaviour.step is not None
        for _ in range(5):
            only.behaviour.step.release()
        assert seen + await rest(call) == answer(PROMPT, 8, 5)


async def stand_by_draining(router: Running, leaving: FakeWorker, other: FakeWorker) -> None:
    await join(router, leaving, other)
    await router.settled(used=1, listed=2)


async def test_a_worker_that_says_draining_is_no_failure() -> None:
    gone = [
        decode_worker(f"d{i}", behaviour=Behaviour(fail=Draining("leaving"), fail_after=i))
        for i in range(4)
    ]
    async with running([*gone, decode_worker("d9")], max_failures=0) as router:
        assert ids(await router.generate(request(12))) == answer(PROMPT, 12, 5)


class Life(asyncio.Event):
    """While set, checks are answered; otherwise they fail at once."""

    async def wait(self) -> Literal[True]:
        if not self.is_set():
            raise Unavailable("dead")
        return True


async def test_who_died_at_the_same_moment_did_not_die_of_the_request() -> None:
    step = asyncio.Semaphore(2)
    first_one = decode_worker("d0", behaviour=Behaviour(step=step, die_after=3))
    async with running([first_one], **PATIENT) as router:
        call = aiter(router.call(request()))
        seen = await first(call, 2)
        (alive := Life()).set()
        second = decode_worker("d1", behaviour=Behaviour(checks=alive, die_after=0))
        await stand_by(router, first_one, second)
        alive.clear()  # it is dead, and the router does not know yet
        step.release()
        await router.settled(used=0)
        await stand_by_draining(router, second, third := decode_worker("d2"))
        assert seen + await rest(call) == answer(PROMPT, 8, 5)
        assert not second.legs
        await second.stop()
        await third.stop()


async def test_a_request_that_kills_is_refused() -> None:
    workers = [decode_worker(f"d{i}", behaviour=Behaviour(die_after=0)) for i in range(4)]
    async with running(workers) as router:
        error = await failing(router.generate(request()))
        assert type(error) is KvrelayError
        assert "2 workers died while they served this request" in str(error)
        assert sum(len(worker.legs) for worker in workers) == 2


async def test_an_internal_error_is_retried_elsewhere_once() -> None:
    bad = [decode_worker(f"d{i}", behaviour=Behaviour(fail=KvrelayError("bug"))) for i in range(3)]
    async with running(bad) as router:
        assert type(await failing(router.generate(request()))) is KvrelayError
        assert sum(len(worker.legs) for worker in bad) == 2
        for worker in bad[1:]:
            worker.behaviour.fail = None
        for seed in range(6):
            assert ids(await router.generate(request(seed=seed))) == answer(PROMPT, 8, seed)


async def test_the_wait_for_a_handoff_has_an_end() -> None:
    prefill = prefill_worker(behaviour=Behaviour(handoff_gate=asyncio.Event()))
    decode = decode_worker()
    async with running([prefill, decode], handoff_wait=0.1, max_failures=0) as router:
        responses = await router.generate(request())
        assert prefill.legs
        assert router.registry.workers[0].usable  # a late handoff is no failure
    assert ids(responses) == answer(PROMPT, 8, 5)
    assert decode.handoffs == [(0, b"")]
    assert [leg.role for leg in responses[-1].usage.legs] == [
        types_pb2.ROLE_PREFILL,
        types_pb2.ROLE_DECODE,
    ]


def test_states() -> None:
    silent, refused = DeadlineExceeded("s"), Unavailable("r")
    assert health_after_answer(serving=True, draining=False) is READY
    assert health_after_answer(serving=False, draining=False).state is HealthState.DRAINING
    assert health_after_answer(serving=True, draining=True).state is HealthState.DRAINING
    assert health_after_failure(silent, False, 0.4, 10).state is HealthState.STARTING
    assert health_after_failure(silent, True, 0.4, 10).state is HealthState.SUSPECT
    assert health_after_failure(silent, True, 10.4, 10).state is HealthState.UNREACHABLE
    assert health_after_failure(refused, True, 0.4, 10).state is HealthState.UNREACHABLE
    assert health_after_failure(Mismatch("role", "m"), True, 0.4, 10).state is HealthState.STARTING
    closed = health_after_failure(NothingListens("nothing listens at h:1"), False, 0.4, 10)
    assert (closed.state, str(closed.problem)) == (HealthState.STARTING, "it does not listen yet")


QUIET, BUSY = (0.0002, 0.001, 0.005), (0.007, 0.051, 0.163)  # median, 90 %, 99 % measured, seconds


def patience(late: tuple[float, ...], checks: int = 200) -> Patience:
    """After so many checks, answered after 5 ms, whose timers fired so late."""
    made, chance = Patience(0.35), random.Random(7)
    for _ in range(checks):
        made.answered(0.005)
        made.woke(chance.choices(late, (50, 45, 5))[0], 0.15)
    return made


def test_a_busy_host_is_told_from_a_dead_worker_by_the_timers_of_the_router() -> None:
    """With 12 processes on 2 cores workers answered 0.65 s late: they were suspect after 0.35 s."""
    assert patience(QUIET).silence == 0.35
    assert 0.65 < patience(BUSY).silence <= 6 * 0.35


def test_patience_ends_with_the_load_and_one_pause_of_the_router_changes_little() -> None:
    made = patience(BUSY)
    for _ in range(60):  # ten seconds
        made.woke(0.0002, 0.15)
    assert made.silence == 0.35
    made.woke(2.0, 0.15)
    assert made.silence < 4 * 0.35
    made.fell_silent(60.0)
    assert made.silence == pytest.approx(6 * 0.35)


class Spoilt:
    """The control stub of a worker, which spoils answers in the way that ``how`` names."""

    def __init__(self, control: worker_pb2_grpc.WorkerServiceAsyncStub, how: str) -> None:
        self._control = control
        self.how = how

    def GetInfo(
        self, request: worker_pb2.GetInfoRequest, timeout: float
    ) -> Awaitable[worker_pb2.GetInfoResponse]:
        return self._control.GetInfo(request, timeout=timeout)

    async def GetLoad(
        self,
        request: worker_pb2.GetLoadRequest,
        timeout: float,  # noqa: ASYNC109 - as the stub has it
    ) -> worker_pb2.GetLoadResponse | None:
        load = await self._control.GetLoad(request, timeout=timeout)
        if self.how == "cancelled":
            raise asyncio.CancelledError
        return None if self.how == "no message" else load


@pytest.mark.parametrize("how", ["no message", "cancelled"])
async def test_a_check_that_goes_wrong_in_a_strange_way_is_not_the_last_one(how: str) -> None:
    async with running([decode_worker()]) as router:
        (known,) = router.registry.workers
        assert isinstance(known.link, GrpcLink)
        spoilt = Spoilt(known.link.control, how)
        known.link.control = spoilt  # type: ignore[assignment]
        await router.settled(used=0)
        spoilt.how = ""
        await router.settled(used=1)


async def test_a_long_leg_on_a_slow_way_is_no_silence() -> None:
    """Checks wait behind the leg until it has arrived."""
    prompt, step = [10 + index % 300 for index in range(80_000)], asyncio.Semaphore(2)
    ask = request(4)
    ask.token_ids.ids[:] = prompt
    does, large = Behaviour(step=step), {"max_model_len": 1 << 20, "num_blocks": 1 << 20}
    workers = [decode_worker(boot, behaviour=does, **large) for boot in ("d0", "d1")]
    with ExitStack() as stack:
        for worker in workers:
            proxy = stack.enter_context(Proxy(await worker.start()))
            proxy.up.faults = Faults(rate=100_000)
            worker.address = proxy.address
        async with running(workers, disaggregate="never", **FAST) as router:
            call = aiter(router.call(ask, 60))
            seen = await first(call, 2)
            assert all(worker.transit == 0 for worker in router.registry.workers)
            step.release()
            step.release()
            seen += await rest(call)
    assert sum(len(worker.legs) for worker in workers) == 1
    assert seen == answer(prompt, 4, 5)


async def test_a_way_that_is_fast_needs_no_patience() -> None:
    """A long leg under way to a worker that stops keeps its other streams waiting no longer."""
    prompt, step = [10 + index % 300 for index in range(80_000)], asyncio.Semaphore(2)
    does, large = Behaviour(step=step), {"max_model_len": 1 << 20, "num_blocks": 1 << 20}
    long = request(2)
    long.token_ids.ids[:] = prompt
    fake = decode_worker("d0", behaviour=does, **large)
    async with running([fake], disaggregate="never") as router:
        (worker,) = router.registry.workers
        with worker.sending(1_000_000):
            assert worker.transit == pytest.approx(20.0)
            worker.arrived(100, 0.0)
            assert worker.transit == pytest.approx(20.0)  # too small to tell
        transit = 20.0
        for _ in range(8):  # a machine that stalls takes one of them for a slow network
            step.release()
            step.release()
            assert ids(await router.generate(long)) == answer(prompt, 2, 5)
            with worker.sending(1_000_000):
                transit = worker.transit
            if transit < 20.0:
                break
        assert transit < 20.0
        with worker.sending(1_000_000):
            worker.arrived(1_000_000, 0.01)
            assert worker.transit == pytest.approx(0.08)
            worker.evict(Unavailable("silent"))
            assert worker.transit == pytest.approx(20.0)


async def test_a_leg_that_was_ended_on_its_way_says_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    prompt = [10 + index % 300 for index in range(80_000)]
    ask = request(2)
    ask.token_ids.ids[:] = prompt
    worker = decode_worker(max_model_len=1 << 20, num_blocks=1 << 20)
    with Proxy(await worker.start()) as proxy:
        worker.address = proxy.address
        async with running([worker], disaggregate="never") as router:
            proxy.up.hold()
            (known,) = router.registry.workers
            monkeypatch.setattr(known, "arrived", lambda size, seconds: told.append(size))
            asked = asyncio.ensure_future(router.generate(ask))
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if known.transit:
                    break
            known.evict(Unavailable("silent"))
            proxy.heal()
            assert ids(await asked) == answer(prompt, 2, 5)
    assert len(told) == 1  # of the second leg


async def test_a_check_whose_deadline_passed_while_the_router_did_not_run_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paused machine: the deadlines of gRPC pass, and no worker has been silent."""
    worker = decode_worker()
    async with running([worker], health_timeout=0.1, unreachable_after=0.2) as router:
        seen: list[HealthState] = []
        monkeypatch.setattr(watch, "LONGEST_CHECK_SECONDS", 0.2)
        monkeypatch.setattr(watch, "STOOD_SECONDS", 0.3)
        usual, late = GrpcLink.load, [True]

        async def load(link: GrpcLink, deadline: Deadline) -> worker_pb2.WorkerLoad:
            if late:
                late.clear()
                time.sleep(0.7)  # noqa: ASYNC251 - the router stands still
                raise DeadlineExceeded("the time limit passed")
            return await usual(link, deadline)

        monkeypatch.setattr(GrpcLink, "load", load)
        router.registry.listen(lambda: seen.append(router.registry.workers[0].health.state))
        await until(lambda: not late)
        await asyncio.sleep(0.5)
        assert set(seen) <= {HealthState.READY}
        assert ids(await router.generate(request())) == answer(PROMPT, 8, 5)


@pytest.mark.parametrize("ending", [False, True])
async def test_a_router_that_ends_does_not_warn_of_workers_that_end_too(
    ending: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = decode_worker()
    async with running([worker], **FAST) as router:
        if ending:
            await router.service.gate.drain()
        await worker.stop()
        await until(lambda: router.registry.workers[0].health.state is HealthState.UNREACHABLE)
    warned = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert any("is unreachable" in text for text in warned) is not ending
