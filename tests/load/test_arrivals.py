"""Requests come when they should, and what the generator missed is not hidden."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from itertools import islice, pairwise, takewhile
from pathlib import Path

import pytest

from benchmarks.stub_server import GOOD, StubManners, stub
from kvrelay.cluster.layout import ROOT
from kvrelay.errors import Rejected
from kvrelay.load.draws import Arrivals, LengthDraw
from kvrelay.load.figures import Course, Durations
from kvrelay.load.request import AnswerPiece, LoadAnswer, LoadRequest
from tests.load.rig import LoadCommand

SEED = 7
SHORT = ("--prompt", 8, "--output", 4)


@pytest.mark.parametrize(
    ("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (None, 0.0)]
)
def test_gaps_have_their_rate_and_burstiness(burstiness: float | None, variation: float) -> None:
    arrivals = Arrivals(rate=50.0, burstiness=burstiness)
    times = [0.0, *islice(arrivals.times(random.Random(SEED)), 20_000)]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, abs=0.05)


@pytest.mark.parametrize(("begin", "end"), [(10.0, 90.0), (90.0, 10.0)])
def test_a_ramp_changes_the_rate_linearly(begin: float, end: float) -> None:
    arrivals = Arrivals(rate=end, ramp_from=begin, seconds=100.0, burstiness=None)
    times = list(takewhile(lambda at: at < 200, arrivals.times(random.Random(SEED))))
    for low, high in ((0, 50), (50, 100), (100, 200)):
        rates = [begin + (end - begin) * min(at, 100) / 100 for at in (low, high)]
        expected = (high - low) * sum(rates) / 2
        assert sum(low <= at < high for at in times) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(
    ("text", "mean"),
    [("64", 64), ("10-20", 15), ("exp:200", 200), ("normal:500:50", 500)],
)
def test_lengths_have_their_mean(text: str, mean: float) -> None:
    lengths, chance = LengthDraw.parse("prompt", text), random.Random(SEED)
    drawn = [lengths.draw(chance) for _ in range(5000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert min(drawn) >= 1


def test_a_lognormal_length_has_its_median() -> None:
    lengths, chance = LengthDraw.parse("prompt", "lognormal:300:1.5"), random.Random(SEED)
    drawn = [lengths.draw(chance) for _ in range(5000)]
    assert statistics.median(drawn) == pytest.approx(300, rel=0.1)


@pytest.mark.parametrize("text", ["", "x", "20-10", "normal:5", "-3", "1e9", "zipf:3", "nan"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Rejected, match=r"output: .*wanted is"):
        LengthDraw.parse("output", text)


def test_quantiles_are_those_of_the_sorted_values() -> None:
    chance, durations = random.Random(SEED), Durations()
    values = [chance.lognormvariate(-3, 1.5) for _ in range(5000)]
    for value in values:
        durations.add(value)
    assert durations.mean() == pytest.approx(statistics.fmean(values))
    for part in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = sorted(values)[max(0, round(part * len(values) + 0.4999) - 1)]
        assert durations.quantile(part) == pytest.approx(exact, rel=0.006)


def test_a_course_stays_small_and_loses_nothing() -> None:
    course = Course()
    for second in range(10_000):
        course.at(float(second)).tokens += 1
    periods = list(course.periods())
    assert len(periods) <= 120
    assert sum(period.tokens for _, period in periods) == 10_000


def test_an_open_loop_sends_what_is_due(load: LoadCommand) -> None:
    with stub(lambda at: StubManners(delay=0.3)) as server:
        found = load(server.url, *SHORT, "--rate", 50, "--constant", "--seconds", 1)
    (level,) = found.levels
    assert level["requests"]["done"] == server.requests == 49  # due at 0.02, 0.04, .. 0.98 s
    assert server.most_open > 5  # it does not wait for answers


def test_a_stall_of_the_generator_is_in_the_latencies_from_due(load: LoadCommand) -> None:
    """With one request at once, one slow answer delays all that are due while it runs."""
    with stub(lambda at: StubManners(delay=1.0) if at == 0 else GOOD) as server:
        flags = ("--rate", 40, "--constant", "--seconds", 1, "--most-open", 1)
        found = load(server.url, *SHORT, *flags)
    (level,) = found.levels
    sent, due = (level[f"seconds_from_{name}"]["ttft"] for name in ("sent", "due"))
    assert level["requests"]["done"] == 39
    assert due["p50"] > 0.3
    assert sent["p50"] < due["p50"] / 2
    assert level["generator"]["kept_up"] is False
    assert "the generator did not keep up" in found.out


def test_conversations_carry_their_history(load: LoadCommand) -> None:
    with stub() as server:
        found = load(server.url, *SHORT, "--turns", 3, "--concurrency", 1, "--requests", 6)
    assert found.levels[0]["requests"]["done"] == 6
    prompts = server.prompts()
    assert [len(prompt) for prompt in prompts] == [8, 20, 32] * 2
    first, second, third, other, *_ = prompts
    assert second[:8] == first
    assert third[:20] == second
    assert other != first


def test_prefixes_are_shared(load: LoadCommand) -> None:
    with stub() as server:
        flags = ("--prefix", 6, "--prefixes", 2, "--requests", 20, "--concurrency", 4)
        load(server.url, *SHORT, *flags)
    prompts = [tuple(prompt) for prompt in server.prompts()]
    assert {len(prompt) for prompt in prompts} == {14}
    assert len({prompt[:6] for prompt in prompts}) == 2
    assert len({prompt[6:] for prompt in prompts}) == 20


def test_the_same_seed_sends_the_same_requests(load: LoadCommand) -> None:
    seen = []
    for seed in (1, 1, 2):
        with stub() as server:
            flags = ("--seed", seed, "--requests", 5, "--concurrency", 1)
            load(server.url, "--prompt", "4-30", "--output", 4, *flags)
        seen.append(server.bodies)
    assert seen[0] == seen[1] != seen[2]


def test_a_trace_is_replayed_at_its_speed_and_size(load: LoadCommand, tmp_path: Path) -> None:
    rows = [(0, 1200, 512, [1, 2, 3]), (4000, 1500, 1024, [1, 2, 4]), (8000, 512, 10, [5])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with stub() as server:
        found = load(server.url, "--trace", trace, "--speed", 10, "--trace-block", 4)
    assert found.status == 0, found.out
    (level,) = found.levels
    assert level["seconds"] >= 0.8  # of 8 s
    prompts = server.prompts()
    assert [len(prompt) for prompt in prompts] == [9, 11, 4]
    assert prompts[0][:8] == prompts[1][:8]
    assert prompts[0][8:] != prompts[1][8:9]
    assert [body["max_tokens"] for body in server.bodies] == [4, 8, 1]


def test_tenants_have_their_shares_and_tokens(load: LoadCommand, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[large]\nshare = 3\ntoken = "l"\n[small]\ntoken = "s"\n')
    with stub() as server:
        flags = ("--tenants", tenants, "--requests", 200, "--concurrency", 8)
        found = load(server.url, *SHORT, *flags)
    asked = server.authorizations
    assert set(asked) == {"bearer l", "bearer s"}
    assert 0.65 < asked.count("bearer l") / 200 < 0.85
    assert sum(found.levels[0]["output_tokens_by_tenant"].values()) == 800


def test_clients_that_leave_and_clients_that_read_slowly(load: LoadCommand) -> None:
    with stub(lambda at: StubManners(gap=0.01)) as server:
        flags = ("--requests", 40, "--concurrency", 8, "--abort", 0.5, "--check-concurrency", 8)
        found = load(server.url, "--prompt", 8, "--output", 40, *flags, "--check", "first-run")
    ends = found.levels[0]["requests"]
    assert 10 <= ends["left"] <= 30
    assert ends["left"] + ends["done"] == 40
    assert server.left > 0  # the connection is closed, so the server can stop
    assert found.status == 0  # what came of the answers was right
    with stub() as server:
        slow = ("--slow", 1, "--slow-rate", 20, "--requests", 4, "--concurrency", 4)
        found = load(server.url, "--prompt", 8, "--output", 20, *slow)
    (level,) = found.levels
    assert level["seconds"] > 0.9
    assert level["seconds_from_sent"]["ttft"]["mean"] is None  # its own latencies, not the server's


@pytest.mark.slow
def test_overload_is_relative_to_the_measured_capacity(load: LoadCommand) -> None:
    """Whatever this machine achieves: the rates are multiples of it."""
    with stub(lambda at: StubManners(status=429 if at % 7 == 6 else 200, delay=0.1)) as server:
        flags = ("--overload", "0.5,3", "--concurrency", 4, "--seconds", 2, "--timeout", 20)
        found = load(server.url, *SHORT, *flags)
    capacity, *multiples = found.levels
    assert capacity["loop"] == "closed"
    for level, factor in zip(multiples, (0.5, 3), strict=True):
        times, rate = level["label"].removesuffix("/s").split(" x, ")
        assert float(times) == factor
        assert float(rate) == pytest.approx(factor * capacity["requests_per_second"], rel=0.01)
        assert level["loop"] == "open"
        ends = level["requests"]
        assert sum(ends.values()) == pytest.approx(2 * float(rate), rel=0.6)
        assert ends["refused"] > 0
    assert max(one["goodput"]["of_peak"] for one in found.levels) == 1.0


def test_ctrl_c_ends_with_the_report(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with stub(lambda at: StubManners(gap=0.02)) as server:
        command = [sys.executable, "-m", "kvrelay", "load", server.url, "--seconds", "120"]
        process = subprocess.Popen(
            [*command, "--output", "5", "--json", str(path), "--check", "first-run"],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while server.requests < 30:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    level = json.loads(path.read_text())["levels"][0]
    assert level["requests"]["done"] > 0
    assert level["seconds"] > 0
    assert "E2E" in out


def test_the_tokens_of_an_event_share_the_time_since_the_last_one() -> None:
    """The mean ITL is then that of the tokens, however the server bundles them."""
    request = LoadRequest(number=0, parts=((1, 2),), max_tokens=6, seed=0)
    answer = LoadAnswer(request, due=0.0, sent=0.0)
    for at, count in ((1.0, 1), (1.5, 1), (2.25, 3), (2.25, 0), (3.0, 1)):
        answer.take(AnswerPiece(at=at, ids=[7] * count))
    assert answer.gaps == [0.5, 0.25, 0.25, 0.25, 0.75]
    assert statistics.fmean(answer.gaps) == answer.token_gap()


def test_the_reports_have_every_request(load: LoadCommand, tmp_path: Path) -> None:
    page, rows = tmp_path / "load.html", tmp_path / "load.csv"
    with stub(lambda at: StubManners(cached=4)) as server:
        flags = ("--concurrency", "1,2", "--requests", 5, "--slo", "ttft=0.0000001,itl=10")
        found = load(server.url, *SHORT, *flags, "--html", page, "--csv", rows)
    lines = rows.read_text().splitlines()
    assert len(lines) == 1 + 10
    assert lines[1].split(",")[:2] == ["1 at once", "0"]
    assert "cached=4 computed=4" in lines[1]
    text = page.read_text()
    assert text.count("<svg") == 3 + 2 + 1
    for outside in ("src=", "href=", "http://www", "https://", "@import", "<script"):
        assert outside not in text
    assert found.levels[0]["goodput"]["requests"] == 0  # the limit of ttft is impossible
    assert found.levels[0]["prompt_tokens_by_source"] == {"cached": 20, "computed": 20}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rate", 1, "--overload", 2), "rate"),
        (("--rate", 1, "--concurrency", 2), "concurrency"),
        (("--burstiness", 2), "rate"),
        (("--rate", 2, "--ramp-from", 1), "seconds"),
        (("--speed", 2), "speed"),
        (("--check", "nothing"), "check"),
        (("--check", "transformers:x", "--chat"), "check"),
        (("--slo", "ttft"), "slo"),
        (("--slo", "tpot=1"), "slo"),
        (("--turns", "x"), "turns"),
        (("--tenants", "/nowhere.toml"), "tenants"),
        (("--trace", "/nowhere.jsonl"), "trace"),
    ],
)
def test_what_contradicts_itself_is_refused(
    load: LoadCommand, flags: tuple[object, ...], named: str
) -> None:
    with stub() as server:
        found = load(server.url, *flags)
    assert found.status == 2
    assert len(found.err.splitlines()) == 1
    assert f"{named}: " in found.err


def test_the_help_fits_a_terminal(load: LoadCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = load("--help")
    assert found.status == 0
    own = found.out.split("Every option can be set")[0]
    assert max(map(len, own.splitlines())) <= 80
