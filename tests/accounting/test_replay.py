"""A journal repeats to the last counter; one changed number in it is found where it stands."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from kvrelay.cli.dispatch import main as command
from kvrelay.engine.core.blocks import Naming
from kvrelay.engine.core.external import Query
from kvrelay.engine.core.journal import VERSION, Journal
from kvrelay.engine.core.plan import EngineLimits
from kvrelay.engine.core.replay import LONGEST_LINE, main, replay
from kvrelay.engine.core.scheduler import Cancel, Lookup, Scheduler
from kvrelay.errors import Rejected
from tests.accounting.bench import Bench, limits

SEED = 20


def head(**changed: int) -> str:
    """A journal's first line."""
    bounds = {**asdict(limits(12, 4)), **changed}
    return json.dumps({"journal": VERSION, "limits": bounds}) + "\n"


def journalled(lines: list[str]) -> Callable[[EngineLimits, Naming, Lookup, Cancel], Scheduler]:
    return lambda bounds, naming, lookup, cancel: Journal(
        bounds, naming, lookup, lines.append, cancel
    )


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """A life with everything in it: preemptions, lies, short and cancelled loads, aborts."""
    print(f"seed {SEED}")
    dice, lines = random.Random(SEED), list[str]()

    def store(query: Query) -> int | None:
        if query.request_id.startswith("load"):
            return 99
        if query.request_id == "grows":
            return 0
        return dice.choice([None, 0, 5, 99, -2])

    bench = Bench(
        limits(12, 4, budget=16, headroom=0),
        store,
        lambda load: dice.randint(-1, load.external),
        journalled(lines),
        lambda load: load.request_id != "load0",
    )
    give_loads_up(bench)
    with pytest.raises(Rejected):
        bench.submit("too long", range(60), 60)
    for number in range(110):
        bench.submit(
            f"r{number}", range(number % 3, number % 3 + 7), 30, prefill_only=not number % 9
        )
        bench.step()
        bench.end_all()
    plan = bench.scheduler.schedule()
    bench.scheduler.discard()
    bench.loads += plan.loads
    bench.saves += plan.saves
    bench.scheduler.abort("r100")
    bench.scheduler.abort("unknown")
    bench.scheduler.loaded("r101", 1, 1)
    bench.run()
    assert bench.scheduler.preemptions >= 100
    return lines


def give_loads_up(bench: Bench) -> None:
    """Two by aborts, of which one cannot be cancelled, and one for a request that grows."""
    for number in range(2):
        bench.submit(f"load{number}", range(9), 3)
        bench.step()
        bench.scheduler.abort(f"load{number}")
    bench.end_all()
    bench.submit("grows", range(7), 22)
    for number in range(2, 4):
        bench.submit(f"load{number}", range(10 * number, 10 * number + 9), 3)
    for _ in range(20):
        bench.step()
    assert bench.scheduler.preemptions == 1
    bench.run()


@pytest.mark.slow
def test_a_journal_repeats_to_the_last_counter(lines: list[str]) -> None:
    done = replay(lines)
    print(done)
    assert done.difference is None
    assert done.events == len(lines) - 1
    assert done.preemptions >= 100
    assert done.ended == 110 + 5


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        ("schedule", r'"entries":\[\["r\d+",\d+,\d+,', r"\g<0>9"),  # a count
        ("schedule", r'"answers":\[', r"\g<0>7,"),
        ("abort", r'"cancels":\[true', '"cancels":[false'),
        ("abort", r'"cancels":\[false', '"cancels":[true'),
        ("schedule", r'"cancels":\[true', '"cancels":[false'),
        ("schedule", r'"tables":\[\[', r"\g<0>1"),
        ("schedule", r'"loads":\[\["r\d+",\d+,\d+,', r"\g<0>9"),  # what is asked of the store
        ("schedule", r'"saves":\[\["r\d+",\d+,\d+,\[', r"\g<0>9"),  # a block
        ("schedule", r'"open_loads":', r"\g<0>1"),
        ("schedule", r'"free":', r"\g<0>1"),
        ("commit", r'"outputs":\[\["r\d+",', r"\g<0>1"),
        ("commit", r'"saves":\[\["r\d+",\d+,\d+,\[', r"\g<0>9"),
        ("commit", r'"sampled":\[\d+', '"sampled":[null'),
        ("commit", r'"executed":', r"\g<0>1"),
        ("commit", r'"late":', r"\g<0>1"),
        ("loaded", r'"heard":true', '"heard":false'),
        ("abort", r'"ended":{"r\d+', r"\g<0>0"),
        ("submit", r'"rejected":"max_tokens"', '"rejected":"prompt"'),
    ],
)
def test_one_changed_number_is_found_where_it_stands(
    lines: list[str], call: str, old: str, new: str
) -> None:
    pattern = re.compile(f'^{{"call":"{call}".*?{old}')
    number = next(number for number, line in enumerate(lines) if pattern.search(line))
    changed = list(lines)
    changed[number] = re.sub(old, new, lines[number], count=1)
    difference = replay(changed).difference
    assert difference is not None
    assert (difference.line, difference.call) == (number + 1, call)


def test_a_lost_event_is_found_later(lines: list[str]) -> None:
    number = next(n for n, line in enumerate(lines) if '"heard":true' in line)
    difference = replay(lines[:number] + lines[number + 1 :]).difference
    assert difference is not None
    assert difference.line > number


def test_a_step_that_is_told_twice_is_found(lines: list[str]) -> None:
    """Two plans without a commit between them: the core refuses that, and so does a replay."""
    number = next(n for n, line in enumerate(lines) if '"entries":[["r' in line)
    difference = replay([*lines[: number + 1], *lines[number:]]).difference
    assert difference is not None
    assert (difference.line, difference.call) == (number + 2, "schedule")
    assert "schedule() before commit()" in difference.replayed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"answers":[]', '"answers":[1.5]'),
        ('"answers":[]', '"answer":[]'),
        ('"prefill_only":', '"prefill":'),
        ('"finish":"abort"', '"finish":"never"'),
        ('"call":"loaded"', '"call":"lifted"'),
        ('"result":', '"results":'),
        ('"valid":', '"valid":"all","was":'),
    ],
)
def test_a_record_that_cannot_be_read_is_named_by_its_line(
    lines: list[str], old: str, new: str
) -> None:
    number = next(number for number, line in enumerate(lines) if old in line)
    changed = [*lines[:number], lines[number].replace(old, new), *lines[number + 1 :]]
    with pytest.raises(Rejected, match=f"^journal: line {number + 1}: "):
        replay(changed)


def test_a_line_cut_off_by_a_crash_is_no_difference(lines: list[str]) -> None:
    done = replay([*lines[:100], lines[100][:20]])
    assert (done.events, done.difference) == (99, None)


def test_an_idle_worker_writes_nothing() -> None:
    lines: list[str] = []
    bench = Bench(limits(12, 4), make=journalled(lines))
    for _ in range(5):
        bench.step()
    assert len(lines) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense\n",
        "[]\n",
        '{"journal":1,"limits":{}}\n',
        '{"journal":3,"limits":{}}\n',
        head(num_blocks=0),
        head(num_blocks=10**12),
        head(block_size=0),
    ],
)
def test_what_is_no_journal_is_refused(text: str) -> None:
    with pytest.raises(Rejected, match="journal"):
        replay(text.splitlines(keepends=True))


def test_the_command_says_what_it_found(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    path.write_text("".join(lines), encoding="utf-8")
    assert main([str(path)]) == 0
    assert "ended: all equal" in capsys.readouterr().out
    path.write_text("".join(lines).replace('"preemptions":40', '"preemptions":41'))
    assert main([str(path)]) == 1
    assert "recorded preemptions 41, replayed 40" in capsys.readouterr().out
    assert command(["replay", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["recorded"] == "preemptions 41"
    assert found["preemptions"] == 40
    assert main([str(tmp_path / "missing")]) == 2
    path.write_bytes(b"\x00\xff\xfe" * 100 + b"\n")
    assert main([str(path)]) == 2
    assert "line 1 is not JSON" in capsys.readouterr().err
    path.write_text(head() + "9" * (LONGEST_LINE + 1))
    assert main([str(path)]) == 2
    assert "line 2 is longer than" in capsys.readouterr().err
