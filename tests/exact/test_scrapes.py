"""Counters while everything happens at once: every scrape of every worker adds up, and none falls.

64 requests at once in pools that preempt them, loads that are short, and a decode worker killed in
the middle of its streams.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.cluster.supervisor import Cluster
from kvrelay.usage import LegUsage
from tests.accounting.journalled import Sums
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.queries import Query, check_usage, complete_all, prompts
from tests.exact.scrape import Scrape, measured, scrape
from tests.models import VOCAB

GROWS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "recomputed_tokens",
    "failed_load_tokens",
    "late_events",
    "executed_positions",
    "num_preemptions",
)


class Scraper(threading.Thread):
    """Scrapes every port until stopped; skips dead workers."""

    def __init__(self, ports: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.seen: dict[str, list[Scrape]] = {name: [] for name in ports}
        self._ports = ports
        self._stop_it = threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(0.02):
            for name, port in self._ports.items():
                try:
                    self.seen[name].append(scrape(port))
                except OSError:
                    continue

    def stop(self) -> None:
        self._stop_it.set()
        self.join(30)


def check_one(seen: Scrape) -> None:
    """I9, and what follows from its definition."""
    prompt, local = seen("prompt_tokens"), seen("prefix_cache_hits")
    external = seen("external_prefix_cache_hits")
    assert seen.by_source() == prompt == seen("prefix_cache_queries")
    assert seen("prompt_tokens_by_source", source="local_cache_hit") == local
    assert seen("prompt_tokens_by_source", source="external_kv_transfer") == external
    assert seen("external_prefix_cache_queries") >= external
    assert seen("prompt_tokens_by_source", source="local_compute") >= 0


def fallen(before: Scrape, after: Scrape) -> list[str]:
    return [metric for metric in GROWS if after(metric) < before(metric)]


def check_sums(seen: Scrape, legs: Sequence[LegUsage], journal: Counter[str]) -> None:
    """A worker's counters are the sums of what its legs reported, and of its journal."""
    assert seen("prompt_tokens") == sum(leg.length for leg in legs)
    assert seen("prefix_cache_hits") == sum(leg.local for leg in legs)
    assert seen("external_prefix_cache_hits") == sum(leg.external for leg in legs)
    assert seen("external_prefix_cache_queries") == journal["asked"]
    assert seen("failed_load_tokens") == sum(leg.failed for leg in legs)
    assert seen("recomputed_tokens") == sum(leg.recomputed for leg in legs)
    assert seen("num_preemptions") == sum(leg.preemptions for leg in legs)
    assert seen("generation_tokens") == sum(leg.generated for leg in legs)
    assert seen("executed_positions") == sum(leg.executed for leg in legs)
    # Hits are loads that were verified, never what a lookup claimed.
    assert seen("external_prefix_cache_hits") <= seen("store_loaded_tokens")


def killer(up: Cluster, scraper: Scraper) -> threading.Thread:
    """Kills a decode worker once it has preempted and loaded."""

    def kill() -> None:
        for _ in range(3000):
            last = scraper.seen["decode-0"][-1:]
            if last and last[0]("num_preemptions") and last[0]("prompt_tokens") > 300:
                up.kill("decode", 0)
                return
            threading.Event().wait(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_every_scrape_adds_up_under_preemption_failure_and_migration(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal.jsonl"
    monkeypatch.setenv("KVRELAY_JOURNAL", str(journal))
    script, ports = tmp_path / "script.json", dict[str, int]()

    def distorted(store: str) -> str:
        short = [{}, {"amount": 5}, {"amount": 0, "times": 2}]
        script.write_text(json.dumps({"store": store, "loads": {"*": short}}))
        return f"mock:{script}"

    queries = [Query(prompt[:24], 40) for prompt in prompts(120, 4, VOCAB, seed=5, longest=24)]
    layout = measured(ports, distorted)
    with cluster(models("llama"), layout, decode=2, block_size=4, num_blocks=40) as up:
        scraper = Scraper(ports)
        scraper.start()
        killing = killer(up, scraper)
        answers = complete_all(up.router, queries, at_once=64)
        killing.join(30)
        up.wait()
        check_idle(up, within=60.0)
        scraper.stop()
        final = {name: scrape(port) for name, port in ports.items()}
        lived = {"prefill-0": up.addresses("prefill")[0], "decode-1": up.addresses("decode")[1]}
    whole = [not any(leg.lost for leg in answer.usage.legs) for answer in answers]
    print(
        f"{whole.count(False)} migrated; scrapes: {[len(seen) for seen in scraper.seen.values()]}"
    )
    assert 0 < whole.count(False) < len(whole)
    for query, answer, unmoved in zip(queries, answers, whole, strict=True):
        assert answer.usage.prompt_tokens == len(query.prompt)
        assert answer.usage.completion_tokens == len(answer.token_ids)
        if unmoved:
            check_usage(query, answer)
    for name, seen in scraper.seen.items():
        for one in seen:
            check_one(one)
        falls = [one for one, after in itertools.pairwise(seen) if fallen(one, after)]
        assert len(falls) == (name == "decode-0"), "counters fall by a restart only"
    for name, address in lived.items():
        legs = [leg for answer in answers for leg in answer.usage.legs if leg.address == address]
        check_one(final[name])
        with Path(f"{journal}.{name}").open(encoding="utf-8") as lines:
            check_sums(final[name], legs, Sums(lines).found)
    assert sum(seen("num_preemptions") for seen in final.values()) > 0
    assert final["decode-1"]("failed_load_tokens") > 0
