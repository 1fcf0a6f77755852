"""A step that never ends loses the engine; long work and idleness do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvrelay.connector.none import NoConnector
from kvrelay.engine.core.request import Order
from kvrelay.engine.core.updates import Ended, Failed, Foresee, Sampled, Update, Work
from kvrelay.engine.engine import Engine, EngineOptions
from kvrelay.engine.watchdog import TURNS, Watchdog
from kvrelay.sampling import Sampling
from tests.engine.fakes import LIMITS, ChainRunner, naming

PATIENCE = 10.0


class Hanging(ChainRunner):
    """Stays in the step in which a prompt of this length is computed."""

    def __init__(self, length: int) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size)
        self.length = length
        self.goes_on = threading.Event()

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        if any(len(work.tokens) == self.length for work in works):
            assert self.goes_on.wait(PATIENCE)
        return super().execute(works, foresee)


@contextmanager
def engine(
    runner: Hanging,
    deliver: Callable[[Sequence[tuple[str, Update]]], None],
    on_fatal: Callable[[], None],
    seconds: float,
) -> Iterator[Engine]:
    options = EngineOptions(on_fatal=on_fatal, step_seconds=seconds)
    made = Engine(runner, LIMITS, naming(), NoConnector(), deliver, options)
    made.start()
    try:
        yield made
    finally:
        runner.goes_on.set()
        made.close()


def test_a_step_that_hangs_loses_the_engine() -> None:
    lost, runner = threading.Event(), Hanging(length=5)
    with engine(runner, lambda _: None, lost.set, seconds=0.1) as made:
        made.submit(Order("a", (1, 2, 3, 4, 5), 5, 2), Sampling())
        assert lost.wait(PATIENCE)


def test_work_and_idleness_do_not() -> None:
    lost, ended = threading.Event(), threading.Semaphore(0)

    def deliver(updates: Sequence[tuple[str, Update]]) -> None:
        for _, update in updates:
            if isinstance(update, Ended | Failed):
                ended.release()

    with engine(Hanging(length=99), deliver, lost.set, seconds=1.0) as made:
        for count in range(200):
            made.submit(Order(str(count), (1, 2, 3), 3, 40), Sampling())
            assert ended.acquire(timeout=PATIENCE)
        assert not lost.is_set()


def test_only_what_stays_is_told() -> None:
    """As long as something else is under way, or nothing, at every turn, nothing hangs."""
    looks: Iterator[int | None] = iter(
        [*range(3 * TURNS), *([None] * 3 * TURNS), *([7] * (TURNS + 1))]
    )
    told, last = threading.Event(), 0

    def at() -> int | None:
        nonlocal last
        last += 1
        return next(looks)

    Watchdog(0.01, at, told.set).start()
    assert told.wait(PATIENCE)
    assert last == 7 * TURNS + 1
