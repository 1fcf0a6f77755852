"""A lookup's deadline starts when it is sent, and only a bounded number is in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvrelay.connector.context import ConnectorOptions
from kvrelay.engine.core.external import Query
from kvrelay.usage import Miss
from kvstore import LookupResult
from kvstore.base import NameQuery
from kvstore.client.memory import forget
from tests.connector.rig import WAIT, Stage, Worker, blocks_for

TOKENS = list(range(9))


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.go.set()
    forget(made.name)


def saved(worker: Worker) -> None:
    worker.fill(TOKENS, blocks_for(8))
    worker.save("saver", TOKENS[:8], blocks_for(8))
    worker.event()


def first_stalls(stage: Stage, worker: Worker) -> tuple[Query, Query]:
    """Two lookups on one thread: the store has the first and does not answer, the second waits."""
    saved(worker)
    stage.stall()
    first, second = worker.query("first", TOKENS), worker.query("second", TOKENS)
    assert worker.connector.lookup(first) is None
    assert stage.asked.acquire(timeout=WAIT)
    assert worker.connector.lookup(second) is None
    return first, second


def test_a_lookup_that_waits_for_a_thread_is_not_late(stage: Stage) -> None:
    """The second of two lookups on one thread waits out the first, and still finds its tokens."""
    now = [time.monotonic()]
    options = ConnectorOptions(lookup_threads=1, lookup_seconds=1, lookup_queue_seconds=60)
    worker = Worker(stage, options, clock=lambda: now[0])
    first, second = first_stalls(stage, worker)
    now[0] += 1.1
    assert worker.connector.lookup(first) == 0
    assert worker.connector.why("first") is Miss.TOO_LATE
    assert worker.connector.lookup(second) is None
    stage.go.set()
    assert worker.ask("second", TOKENS) == 8
    worker.connector.close()
    assert worker.idle


def test_a_lookup_that_waits_too_long_for_a_thread_is_never_sent(stage: Stage) -> None:
    now = [time.monotonic()]
    options = ConnectorOptions(lookup_threads=1, lookup_seconds=60, lookup_queue_seconds=5)
    worker = Worker(stage, options, clock=lambda: now[0])
    _, second = first_stalls(stage, worker)
    now[0] += 5.5
    assert worker.connector.lookup(second) == 0
    assert worker.connector.why("second") is Miss.TOO_LATE
    stage.go.set()
    assert worker.ask("first", TOKENS) == 8
    worker.until(lambda: worker.counters.open_lookups == 0)
    assert (len(stage.lookups), worker.counters.lookups) == (1, 1)
    worker.connector.close()
    assert worker.idle


class SlowStage(Stage):
    """Answers each lookup after a while, and remembers how many were in flight at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._counting = threading.Lock()
        self._flying = 0
        self.most = 0

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        with self._counting:
            self._flying += 1
            self.most = max(self.most, self._flying)
        time.sleep(self._seconds)
        with self._counting:
            self._flying -= 1
        return super().lookup(query, timeout)


def test_no_hit_is_lost_when_the_whole_queue_asks_at_once() -> None:
    """1,024 requests ask in one step; each lookup takes 5 ms, so all together take over a second.

    Under one deadline of a second for all of them a quarter of the hits was lost.
    """
    stage = SlowStage(0.005)
    worker = Worker(stage, ConnectorOptions(lookup_queue_seconds=WAIT * 6))
    saved(worker)
    queries = [worker.query(f"r{number}", TOKENS) for number in range(1024)]
    answers: dict[str, int] = {}

    def answered() -> bool:
        for query in queries:
            if query.request_id not in answers:
                answer = worker.connector.lookup(query)
                if answer is not None:
                    answers[query.request_id] = answer
        return len(answers) == len(queries)

    worker.until(answered)
    assert list(answers.values()) == [8] * 1024
    assert stage.most == ConnectorOptions().lookup_threads
    worker.connector.close()
    forget(stage.name)
    assert worker.idle
