"""Every scrape adds up while requests are preempted, aborted and badly served by their store."""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.connector.counters import ConnectorCounters
from kvrelay.connector.mock import MockEnd, Script
from kvrelay.worker.metrics import WorkerHistograms, registry_of
from tests.accounting.bench import limits
from tests.accounting.journalled import Sums
from tests.accounting.served import AUDITED, Served
from tests.exact.scrape import Scrape, parsed


class Scraper(threading.Thread):
    """Reads as fast as it can, and once more at the end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(daemon=True)
        self.seen: list[Scrape] = []
        self._registry = registry
        self._over = threading.Event()

    def run(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()
            self.seen.append(parsed(generate_latest(self._registry).decode()))

    def stop(self) -> None:
        self._over.set()
        self.join(60)


def submit(served: Served, numbers: range) -> None:
    """Those of an engine that has not started compete for its pool, however slow this thread is."""
    for number in numbers:
        served.submit(f"r{number}", range(number % 5, number % 5 + 9), 30)


def test_the_counters_are_what_the_journal_adds_up_to() -> None:
    """Of every leg, those too that were aborted and whose accounts nobody got."""
    journal: list[str] = []
    script = Script(
        lookups={"*": [None, 5, 99, -3]},
        loads={"*": [MockEnd(3, after=2, times=2), MockEnd(0), MockEnd(after=3, strays=(1,))]},
        saves={"*": [MockEnd(after=5, times=2)]},
    )
    served = Served(limits(12, 4, budget=16, headroom=0), script, journal)
    submit(served, range(40))
    with served:
        for number in range(40, 80):
            submit(served, range(number, number + 1))
            if number % 4 == 3:
                served.engine.abort(f"r{number - 2}")
                served.orders.pop(f"r{number - 2}")
        served.wait(*served.orders)
        served.settle()
        totals = served.engine.load().totals
        assert totals.executed == served.runner.executed_positions
    sums = Sums(journal).found
    assert {name: getattr(totals, name) for name in sums} == dict(sums)
    assert sums.keys() >= {"prompt", "local", "external", "failed", "executed", "generated"}
    assert min(sums["preemptions"], sums["failed"], sums["external"]) > 0


def test_a_worker_without_a_store_has_looked_nothing_up_there() -> None:
    with Served(limits(12, 4), Script()) as served:
        served.submit("r", range(9), 3)
        served.wait("r")
        seen = parsed(
            generate_latest(
                registry_of(served.engine, {}, WorkerHistograms(), has_store=False)
            ).decode()
        )
        assert seen("prompt_tokens") == 9
        assert seen("external_prefix_cache_queries") == seen("external_prefix_cache_hits") == 0
        seen = parsed(generate_latest(registry_of(served.engine, {}, WorkerHistograms())).decode())
        assert seen("external_prefix_cache_queries") == 9


def test_sums_by_source_equal_prompt_tokens_on_every_scrape() -> None:
    script = Script(
        lookups={"*": [None, 5, 99, -3, 10**6]},
        loads={"*": [MockEnd(3, times=2), MockEnd(0), MockEnd(after=3), MockEnd(strays=(1,))]},
        saves={"*": [MockEnd(after=5, times=2)]},
    )
    served = Served(limits(12, 4, budget=16, headroom=0), script)
    submit(served, range(30))
    with served:
        scraper = Scraper(registry_of(served.engine, {}, WorkerHistograms()))
        scraper.start()
        for number in range(30, 60):
            submit(served, range(number, number + 1))
            if number % 7 == 3:
                served.engine.abort(f"r{number - 1}")
                served.orders.pop(f"r{number - 1}")
        served.wait(*served.orders)
        served.settle()
        scraper.stop()
        ended = [served.ended(request_id) for request_id in served.orders]
    for seen in scraper.seen:
        assert seen.by_source() == seen("prompt_tokens") == seen("prefix_cache_queries")
        hits = seen("external_prefix_cache_hits")
        assert 0 <= hits <= seen("external_prefix_cache_queries")
    for before, after in itertools.pairwise(scraper.seen):
        for name in ("prompt_tokens", "external_prefix_cache_hits", "late_events"):
            assert before(name) <= after(name)
    last = scraper.seen[-1]
    print(f"{len(scraper.seen)} scrapes, {last('num_preemptions'):.0f} preemptions")
    assert last("num_preemptions") > 10
    assert last("external_prefix_cache_hits") >= sum(leg.tokens.external for leg in ended) > 0
    assert last("executed_positions") == served.runner.executed_positions


def test_every_counter_of_the_store_connector_has_a_metric() -> None:
    with Served(limits(8, 4), Script()) as served:
        page = generate_latest(
            registry_of(served.engine, {}, WorkerHistograms(), ConnectorCounters)
        ).decode()
    names = set(re.findall(r"^# TYPE kvrelay:(store_\w+?)(?:_total)? ", page, re.MULTILINE))
    assert len(names) == len(ConnectorCounters.__slots__)


def test_histograms_of_steps_and_legs() -> None:
    """Every step of the runner and every account that was sent, once."""
    histograms = WorkerHistograms()
    options = replace(AUDITED, on_step=histograms.step)
    with Served(limits(40, 4, budget=16), Script(), options=options) as served:
        for number in range(3):
            served.submit(f"r{number}", range(number, number + 9), 5)
        served.wait(*served.orders)
        for request_id in served.orders:
            histograms.leg(served.ended(request_id))
        served.settle()
        steps, positions = served.engine.load().steps, served.runner.executed_positions
        seen = parsed(generate_latest(registry_of(served.engine, {}, histograms)).decode())
    assert seen("step_time_seconds_count") == seen("step_requests_count") == steps > 5
    assert seen("iteration_tokens_total_sum") == seen("leg_computed_tokens_sum") + 12 == positions
    assert seen("leg_tokens_sum") == 27
    assert seen("leg_generation_tokens_sum") == 15
    for name in ("queue", "load", "prefill"):
        assert seen(f"leg_{name}_time_seconds_count") == 3
