"""A scripted store under the real services, each its own process: right tokens, exact counters.

``--store mock:FILE`` distorts what the real store does, request by request. A prompt of 30 tokens
is 7 blocks of 4 and a tail of 2; the decode leg has 31, of which 30 may come from the store.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvrelay import Client, Completion
from kvrelay.cli.dispatch import main
from kvrelay.cluster.supervisor import Cluster
from kvrelay.usage import Miss
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.oracle import Oracle
from tests.exact.scrape import Scrape, measured, scrape
from tests.models import VOCAB

PROMPT, BLOCK, MADE = 30, 4, 8
Missed = tuple[str, int] | None
NEW: Missed = ("never_stored", 8)


@dataclass(frozen=True)
class Leg:
    """What its account must say; the rest of its tokens are computed."""

    external: int = 0
    failed: int = 0
    missed: Missed = None


@dataclass(frozen=True)
class Case:
    """Lines of the script for one request, and its two legs."""

    prefill: Leg
    decode: Leg
    lookups: list[object] = field(default_factory=list)
    loads: list[dict[str, object]] = field(default_factory=list)
    saves: list[dict[str, object]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    late: tuple[int, int] = (0, 0)


ALL = Leg(external=30)
CASES = {
    "as it is": Case(Leg(missed=NEW), ALL),
    # The lie is ordered, is not there, and is computed.
    "match 8": Case(
        Leg(failed=8, missed=("too_late", 8)),
        Leg(external=8, missed=("evicted", 6)),
        lookups=[8],
        misses=["evicted"],
    ),
    "match 10, no multiple of a block": Case(
        Leg(failed=10, missed=("too_late", 8)),
        Leg(external=8, failed=2, missed=("too_late", 6)),
        lookups=[10],
    ),
    "too many": Case(Leg(failed=29, missed=("too_late", 8)), ALL, lookups=[10**6]),
    "negative": Case(
        Leg(missed=("expired", 8)),
        Leg(missed=("expired", 8)),
        lookups=[-5],
        misses=["expired"],
    ),
    "later five times": Case(Leg(missed=NEW), ALL, lookups=[None] * 5 + ["ask"]),
    "slow": Case(Leg(missed=NEW), ALL, loads=[{"after": 9}], saves=[{"after": 4}]),
    "short": Case(
        Leg(missed=NEW),
        Leg(external=13, failed=17, missed=("failed_verification", 4)),
        loads=[{"amount": 13, "missed": "failed_verification"}],
    ),
    "failed": Case(
        Leg(missed=NEW),
        Leg(failed=30, missed=("unreachable", 8)),
        loads=[{"amount": 0, "missed": "unreachable"}],
    ),
    "a negative load": Case(
        Leg(missed=NEW), Leg(failed=30, missed=("unknown", 8)), loads=[{"amount": -7}]
    ),
    "more than there is": Case(Leg(missed=NEW), ALL, loads=[{"amount": 10**6}]),
    "told three times": Case(
        Leg(missed=NEW), ALL, loads=[{"times": 3}], saves=[{"times": 2}], late=(1, 4)
    ),
    "of other epochs": Case(Leg(missed=NEW), ALL, loads=[{"strays": [-1, 1, 1000]}], late=(0, 3)),
    "out of order": Case(
        Leg(missed=NEW), ALL, loads=[{"after": 2}], saves=[{"after": 6}, {}, {"after": 1}]
    ),
    "a save that lies": Case(Leg(missed=NEW), ALL, saves=[{"amount": -1}, {"amount": 99}]),
}
PROMPTS = {name: tuple(random.Random(name).choices(range(VOCAB), k=PROMPT)) for name in CASES}


@dataclass(frozen=True)
class Results:
    """Answers to every case, one after another, with a scrape of both workers after each."""

    answers: dict[str, Completion]
    before: dict[str, tuple[Scrape, Scrape]]
    after: dict[str, tuple[Scrape, Scrape]]
    wanted: dict[str, list[int]]
    router: str


def script_at(path: Path, store: str) -> str:
    """Writes the file; its URL."""
    lines = {
        part: {name: getattr(case, part) for name, case in CASES.items() if getattr(case, part)}
        for part in ("lookups", "loads", "saves", "misses")
    }
    path.write_text(json.dumps({"store": store, "reverse": True, **lines}))
    return f"mock:{path}"


def complete(up: Cluster, name: str) -> Completion:
    with Client(up.router) as client:
        return client.complete(
            token_ids=PROMPTS[name],
            max_tokens=MADE,
            temperature=0.0,
            request_id=name,
            explain=True,
            timeout=120.0,
        )


@pytest.fixture(scope="module")
def results(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    path = tmp_path_factory.mktemp("script") / "script.json"
    ports: dict[str, int] = {}
    layout = measured(ports, lambda store: script_at(path, store))
    folder = models("llama")
    with cluster(folder, layout, block_size=BLOCK, num_blocks=64) as up:
        results, oracle = Results({}, {}, {}, {}, up.router), Oracle(folder)
        for name, prompt in PROMPTS.items():
            results.before[name] = scrape(ports["prefill-0"]), scrape(ports["decode-0"])
            results.answers[name] = complete(up, name)
            check_idle(up, within=60.0)
            results.after[name] = scrape(ports["prefill-0"]), scrape(ports["decode-0"])
            results.wanted[name] = oracle.greedy(prompt, MADE)
        yield results


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_and_the_account_are_exact(name: str, results: Results) -> None:
    answer, case = results.answers[name], CASES[name]
    assert list(answer.token_ids) == results.wanted[name]
    prefill, decode = answer.usage.legs
    for leg, length, wanted in ((prefill, 30, case.prefill), (decode, 31, case.decode)):
        assert (leg.length, leg.local) == (length, 0)
        assert (leg.external, leg.failed) == (wanted.external, wanted.failed)
        assert leg.computed == length - wanted.external
        assert leg.recomputed == 0
        assert leg.executed == leg.computed + max(leg.generated - 1, 0)
        missed = [(m.reason.value, m.blocks) for m in leg.missed]
        told = wanted.missed
        assert missed == ([] if told is None else [(told[0], told[1])])
    assert answer.usage.cached_prompt_tokens == case.prefill.external == 0


@pytest.mark.parametrize("name", CASES)
def test_the_counters_move_by_just_that_account(name: str, results: Results) -> None:
    case = CASES[name]
    legs = (case.prefill, case.decode)
    for leg, before, after, length, late, usage in zip(
        legs,
        results.before[name],
        results.after[name],
        (30, 31),
        case.late,
        results.answers[name].usage.legs,
        strict=True,
    ):

        def moved(metric: str, at: tuple[Scrape, Scrape] = (before, after), **of: str) -> float:
            return at[1](metric, **of) - at[0](metric, **of)

        assert moved("prompt_tokens") == length
        assert moved("prompt_tokens_by_source", source="external_kv_transfer") == leg.external
        assert moved("prompt_tokens_by_source", source="local_compute") == length - leg.external
        assert moved("external_prefix_cache_queries") == length
        assert moved("external_prefix_cache_hits") == leg.external
        assert moved("failed_load_tokens") == leg.failed
        assert moved("recomputed_tokens") == 0
        assert moved("executed_positions") == usage.executed
        assert moved("late_events") == late
        assert moved("generation_tokens") == usage.generated
        reasons = {m.value: moved("missed_blocks", reason=m.value) for m in Miss}
        told = {} if leg.missed is None else dict([leg.missed])
        assert {reason: count for reason, count in reasons.items() if count} == told
        assert after.by_source() == after("prompt_tokens")


def test_the_command_line_says_why(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    def generate(first: int, *flags: str) -> None:
        ids = ",".join(map(str, range(first, first + 30)))
        command = ["generate", "--router", results.router, "--token-ids", ids, "--max-tokens", "4"]
        # Greedy: a sampled first token may end the answer, which then has no decode leg.
        assert main([*command, "--temperature", "0", *flags]) == 0

    generate(100, "--explain")
    assert "8 blocks missed: never_stored" in capsys.readouterr().err
    generate(140, "--explain", "--json")
    prefill, decode = json.loads(capsys.readouterr().out)["usage"]["legs"]
    assert prefill["missed"] == [{"reason": "MISS_NEVER_STORED", "blocks": 8}]
    assert decode["missed"] == []
    generate(180, "--usage")
    assert "missed" not in capsys.readouterr().err, "only with --explain"


def test_what_the_store_connector_counts_is_exported(results: Results) -> None:
    prefill, decode = results.after["a save that lies"]
    assert prefill("store_saved_blocks") >= 8 * len(CASES)
    assert prefill("store_absent_blocks") == 3, "three lies were ordered"
    assert decode("store_loaded_tokens") >= decode("external_prefix_cache_hits") > 0
    assert decode("store_lookup_tokens") > 0
    assert decode("store_corrupt_blocks") == decode("store_job_crashes") == 0
    for name in ("lookups", "loads", "saves", "save_bytes"):  # leases go back on their own time
        assert prefill(f"store_{name}_open") == decode(f"store_{name}_open") == 0
