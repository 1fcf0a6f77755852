"""A router that says nothing is given up; one that is busy, slow or far away is not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from kvrelay import AsyncClient, Client
from kvrelay.client import liveness
from kvrelay.client.aio import AsyncStream
from kvrelay.client.liveness import Liveness
from kvrelay.errors import Unavailable
from tests.failures.proxy import Faults, Proxy
from tests.router.fakes import Behaviour, answer, decode_worker, running

PROMPT = list(range(10, 21))


@dataclass(eq=False)
class Listener:
    """A stream, as a liveness monitor sees it."""

    transit: int = 0
    lost: list[Unavailable] = field(default_factory=list)
    ended: bool = False

    @property
    def open(self) -> bool:
        return not (self.ended or self.lost)

    def give_up(self, error: Unavailable) -> None:
        self.lost.append(error)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of a liveness monitor."""
    clock = [1000.0]
    monkeypatch.setattr("kvrelay.client.liveness.time.monotonic", lambda: clock[0])
    return clock


def drive(one: Liveness, now: list[float], answers: str) -> list[tuple[float, bool]]:
    """Steps, each as long as it may be; ``y``, ``n`` are answers to those that ask."""
    told, answered, steps = iter(answers), False, []
    while (step := one.next(answered)) is not None:
        steps.append((step.seconds, step.probe))
        now[0] += step.seconds
        answered = step.probe and next(told, "n") == "y"
    return steps


def test_two_questions_without_an_answer(now: list[float]) -> None:
    one, stream, other = Liveness(), Listener(), Listener()
    assert one.begin(stream)
    assert not one.begin(other)
    assert drive(one, now, "") == [(5.0, False), (5.0, True), (5.0, True)]
    assert now == [1015.0]  # as docs/failures.md says
    assert "silent for 15 s" in str(stream.lost[0])
    assert len(stream.lost) == len(other.lost) == 1
    assert stream.lost[0] is not other.lost[0]  # each is raised with a traceback of its own
    again = Listener()
    assert one.begin(again)  # from nothing
    assert len(drive(one, now, "")) == 3


def test_any_answer_counts(now: list[float]) -> None:
    one, stream = Liveness(), Listener()
    one.begin(stream)
    assert len(drive(one, now, "nynynyny")) == 4 * 3 + 3
    assert "silent for 15 s" in str(stream.lost[0])


def test_what_comes_meanwhile_counts(now: list[float]) -> None:
    one, stream = Liveness(), Listener()
    one.begin(stream)
    for _ in range(10):
        step = one.next(False)
        assert step is not None
        now[0] += step.seconds
        if step.probe:
            one.note_message()  # of any stream, before the answer
            now[0] += 0.1
    assert not stream.lost
    stream.ended = True
    assert one.next(False) is None
    assert one.begin(Listener())


def test_a_long_request_is_given_its_time(now: list[float]) -> None:
    one, stream = Liveness(), Listener(transit=1_000_000)
    one.begin(stream)
    assert drive(one, now, "") == [(5.0, False), (25.0, True), (25.0, True)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
async def test_a_silent_router_and_then_another_one(kind: str) -> None:
    """Also: its silence between two tokens is none, as long as it answers at all."""
    step = asyncio.Semaphore(2)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with running([worker], disaggregate="never") as router:
        with Proxy(router.address) as proxy:
            if kind == "sync":
                reading = asyncio.to_thread(_read, proxy.address, router.address)
            else:
                reading = _read_async(proxy.address, router.address)
            task = asyncio.ensure_future(reading)
            await asyncio.sleep(2.5)
            assert not task.done()
            proxy.up.hold()
            proxy.down.hold()
            begun = time.monotonic()
            for _ in range(20):
                step.release()
            assert await asyncio.wait_for(task, 20) == answer(PROMPT, 8, 5)
            print(f"{kind}: {time.monotonic() - begun:.2f} s")
            proxy.heal()


def _read(address: str, other: str) -> list[int]:
    seen: list[int] = []
    with Client(address) as client, Client(other) as second:
        stream = client.generate(token_ids=PROMPT, max_tokens=8, seed=5, ignore_eos=True)
        with pytest.raises(Unavailable, match="the router was silent"):
            seen.extend(token for chunk in stream for token in chunk.token_ids)
        for chunk in second.resume(stream):
            seen += chunk.token_ids
    return seen


async def _read_async(address: str, other: str) -> list[int]:
    seen: list[int] = []
    async with AsyncClient(address) as client, AsyncClient(other) as second:
        stream = client.generate(token_ids=PROMPT, max_tokens=8, seed=5, ignore_eos=True)
        with pytest.raises(Unavailable, match="the router was silent"):
            await _take(stream, seen)
        await _take(second.resume(stream), seen)
    return seen


async def _take(stream: AsyncStream, seen: list[int]) -> None:
    async for chunk in stream:
        seen += chunk.token_ids


@pytest.mark.usefixtures("quick")
async def test_a_slow_upload_is_no_silence() -> None:
    prompt = [10 + index % 300 for index in range(150_000)]
    worker = decode_worker(max_model_len=1 << 20, num_blocks=1 << 20)
    async with running([worker], disaggregate="never") as router:
        with Proxy(router.address) as proxy:
            proxy.up.faults = Faults(rate=100_000)
            async with AsyncClient(proxy.address) as client:
                done = await client.complete(timeout=30, token_ids=prompt, max_tokens=2, seed=5)
    assert list(done.token_ids) == answer(prompt, 2, 5)
