"""Trace, replay, optimum: figures that were worked out in another way."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks import folds as folding
from benchmarks.folds import GRID, WORST, Measured, Score, chosen, folds, parts_of
from benchmarks.workloads import Numbers, agents, conversations, requests
from kvrelay.cli.dispatch import main
from kvrelay.errors import Rejected
from kvstore.index.eviction import make_policy
from kvstore.index.eviction.expected_returns import ExpectedReturns
from kvstore.index.eviction.life_table import TUNED, Tuning
from kvstore.index.eviction.policy import LeastRecentlyUsed
from kvstore.limits import EVICTIONS
from kvstore.trace.optimum import optimum
from kvstore.trace.requests import TraceRequest, read_trace
from kvstore.trace.simulate import replay, unbounded

SEED = 11


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """The file that ``read_trace`` gives these of."""
    with path.open("w", encoding="utf-8") as file:
        for one in requests:
            row = {
                "timestamp": round(one.at * 1000),
                "input_length": one.tokens,
                "output_length": one.output,
                "hash_ids": [int.from_bytes(name, "little") for name in one.names],
            }
            file.write(json.dumps(row) + "\n")


def trace_of(*chains: str) -> list[TraceRequest]:
    """Each letter a block."""
    return [
        TraceRequest(float(at), 512 * len(chain), 1, tuple(letter.encode() for letter in chain))
        for at, chain in enumerate(chains)
    ]


def small() -> list[TraceRequest]:
    return requests(conversations(random.Random(SEED), 400))


def plain_rate(trace: Sequence[TraceRequest], budget: int) -> float:
    """Least recently used, of a prompt the last block first, as a list in order says it."""
    there: OrderedDict[bytes, None] = OrderedDict()
    hits = total = 0
    for request in trace:
        total += len(request.names)
        hits += next((i for i, n in enumerate(request.names) if n not in there), len(request.names))
        for name in reversed(request.names):
            there[name] = None
            there.move_to_end(name)
        while len(there) > budget:
            there.popitem(last=False)
    return hits / total


@pytest.mark.parametrize("budget", [150, 250, 400])
def test_least_recently_used_is_what_a_list_in_order_says(budget: int) -> None:
    trace = small()
    assert replay(trace, budget, LeastRecentlyUsed()).rate == plain_rate(trace, budget)


def test_the_figures_of_a_small_trace_stay_what_they_are() -> None:
    trace = small()
    found = {
        budget: [round(100 * replay(trace, budget, make_policy(n)).rate, 2) for n in EVICTIONS]
        for budget in (100, 300)
    }
    best = {budget: round(100 * optimum(trace, budget).rate, 2) for budget in (100, 300)}
    assert found == {100: [42.03, 41.88], 300: [66.37, 66.94]}
    assert best == {100: 59.72, 300: 80.62}


def test_the_optimum_keeps_what_comes_back_first() -> None:
    trace = trace_of("ab", "c", "d", "ab", "c", "d")
    assert optimum(trace, 3).hits == 3  # a and b stay, of c and d there is room for one
    assert optimum(trace, 4).hits == 4
    assert optimum(trace_of("a", "b", "c", "a", "b", "c"), 2).hits == 2
    assert replay(trace_of("a", "b", "c", "a", "b", "c"), 2, LeastRecentlyUsed()).hits == 0


@pytest.mark.parametrize("budget", [50, 150, 500])
def test_nothing_is_above_the_optimum_nor_above_no_limit(budget: int) -> None:
    for trace in (small(), requests(agents(random.Random(SEED), 300))):
        best, free = optimum(trace, budget), unbounded(trace)
        assert best.hits <= free.hits
        for name in EVICTIONS:
            assert replay(trace, budget, make_policy(name)).hits <= best.hits
        assert optimum(trace, 10**6) == free


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    trace = [
        TraceRequest(0.5, 700, 3, (bytes(8), b"\1" + bytes(7))),
        TraceRequest(2.0, 512, 1, (bytes(8),)),
    ]
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert list(read_trace(path)) == trace
    assert list(read_trace(path, limit=1)) == trace[:1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}', "hash_ids"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "Overflow"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [7, 8, 7]}', "twice"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": "12"}', "no list"),
        ('{"timestamp": 9, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "no list"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp"),
        (
            '{"timestamp": 1e300, "input_length": 1, "output_length": 1, "hash_ids": []}',
            "timestamp",
        ),
        (
            '{"timestamp": 9, "input_length": -1, "output_length": 1, "hash_ids": []}',
            "input_length",
        ),
        ("[" * 100_000, "RecursionError"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp"),
        ('{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": []}', "earlier"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(0.005, 512, 1, (b"a",))])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(Rejected, match=f"trace.jsonl:2: .*{words}"):
        list(read_trace(path))


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, small())
    words = ["store", "simulate", str(path), "--budgets", "100,300"]
    assert main([*words, "--policy", "lru", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["budget"], row["policy"]) for row in rows] == [
        (100, "lru"),
        (100, "optimum"),
        (300, "lru"),
        (300, "optimum"),
        (None, "any"),
    ]
    assert rows[0]["hit_rate"] == plain_rate(small(), 100)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("returns" in line for line in lines) == 2
    assert main(["store", "simulate", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_text("")
    assert main(["store", "simulate", str(path)]) == 2


@dataclass(frozen=True)
class Told(Measured):
    """Scores that are given instead of measured."""

    scores: Mapping[Tuning, Score] = field(default_factory=dict)

    def score(self, tuning: Tuning) -> Score:
        return self.scores.get(tuning, Score(0.1, 0.0))


def told(scores: Mapping[Tuning, Score]) -> Told:
    return Told("told", (), (), scores)


def test_the_best_parameters_that_are_never_worse_than_lru_are_chosen() -> None:
    shipped, good, better, unsafe = TUNED, *[one for one in GRID if one != TUNED][:3]
    assert chosen([told({})]) == shipped, "nothing tells them apart"
    scores = {good: Score(0.2, 0.0), better: Score(0.3, 0.0), unsafe: Score(0.4, WORST - 0.01)}
    assert chosen([told(scores)]) == better
    assert chosen([told(scores), told({good: Score(0.9, 0.0)})]) == good
    assert chosen([told(dict.fromkeys(GRID, Score(0.1, WORST - 1)) | scores)]) == better


def turns(chance: random.Random, pause: float) -> list[TraceRequest]:
    """Forty conversations of some turns."""
    new, events = Numbers(), []
    for number in range(40):
        at, chain = 10.0 * number, new.take(3)
        for _ in range(chance.randrange(1, 8)):
            events.append((at, chain))
            at += chance.expovariate(1 / pause)
            chain += new.take(2)
    return requests(events)


def test_what_was_chosen_on_a_part_is_judged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "GRID", [TUNED, Tuning(learn=100)])
    chance = random.Random(5)
    chats, tools = (turns(chance, pause) for pause in (60.0, 5.0))
    parts = parts_of(chats, 2, seed=1)
    assert sum(map(len, parts)) == len(chats)
    seen = [{request.names[0] for request in part} for part in parts]
    assert not seen[0] & seen[1], "a conversation is in one part"
    traces = [Measured("chats", chats, [120]), Measured("tools", tools, [80])]
    table = [line.split(" | ") for line in folds(traces, 2, seed=1)][2:]
    assert [(row[0].strip("| "), row[4]) for row in table] == [
        ("chats, part 2", "chats, part 1"),
        ("chats, part 2", "tools"),
        ("chats, part 1", "chats, part 2"),
        ("chats, part 1", "tools"),
        ("tools, part 2", "tools, part 1"),
        ("tools, part 2", "chats"),
        ("tools, part 1", "tools, part 2"),
        ("tools, part 1", "chats"),
    ]
    whole = replay(tools, 80, ExpectedReturns()).rate - replay(tools, 80, LeastRecentlyUsed()).rate
    assert f"({100 * whole:+.2f})" in table[1][6]
