"""Each check finds the defect that it is for; a server without one passes all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.stub_server import GOOD, StubManners, stub
from kvrelay.cli.dispatch import main
from kvrelay.conform.abilities import Abilities
from kvrelay.conform.checks import NAMES
from kvrelay.conform.exam import ConformPlan, Crowd, Exam
from kvrelay.load.draws import LengthDraw
from kvrelay.load.http_door import HttpDoor
from kvrelay.load.request import AnswerPiece, LoadRequest
from tests.conform.fake import FakeManners, fake

SEED = 5
SMALL = ("--seed", SEED, "--prompts", 2, "--output", 16, "--flood", 8192)


@dataclass(frozen=True)
class Examined:
    """What the command said and wrote."""

    status: int
    out: str
    err: str
    json: dict[str, Any]

    def outcomes(self, name: str) -> dict[str, str]:
        """By kind of sampling."""
        (row,) = [row for row in self.json["checks"] if row["name"] == name]
        return {kind: row[kind]["outcome"] for kind in ("greedy", "sampled", "all") if kind in row}

    def having(self, outcome: str) -> set[str]:
        """The names of checks."""
        names = [row["name"] for row in self.json["checks"]]
        return {name for name in names if outcome in self.outcomes(name).values()}

    def lines(self, name: str) -> list[str]:
        """The differences that a check found."""
        (row,) = [row for row in self.json["checks"] if row["name"] == name]
        kinds = [row[kind] for kind in ("greedy", "sampled", "all") if kind in row]
        return [str(line) for kind in kinds for line in kind["differences"]]

    @property
    def said(self) -> str:
        """What was printed, without line breaks."""
        return " ".join(self.out.split())


class ConformCommand:
    """``kvrelay conform`` in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, url: str, *words: object) -> Examined:
        path = self.folder / "conform.json"
        path.unlink(missing_ok=True)
        self._capsys.readouterr()
        try:
            status = main(["conform", url, *map(str, (*SMALL, *words)), "--json", str(path)])
        except SystemExit as end:
            status = int(str(end.code))
        seen = self._capsys.readouterr()
        text = path.read_text() if path.exists() else ""
        return Examined(status, seen.out, seen.err, json.loads(text) if text else {})


@pytest.fixture
def conform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> ConformCommand:
    return ConformCommand(tmp_path, capsys)


def test_an_exact_server_passes_every_check(conform: ConformCommand, tmp_path: Path) -> None:
    restarts = tmp_path / "restarts"
    command = f'echo "$KVRELAY_RESTART" >> {restarts}'
    with fake(FakeManners()) as url:
        found = conform(url, "--restart-command", command, "--restarts", 2)
    assert found.status == 0, found.out
    assert [row["name"] for row in found.json["checks"]] == list(NAMES)
    assert found.having("exact") == set(NAMES), found.out
    assert not found.having("not supported") | found.having("no verdict") | found.having("differs")
    assert restarts.read_text().split() == ["1", "2"]
    assert max(map(len, found.out.splitlines())) <= 80
    assert f"--seed {SEED}" in found.out


CROWDED = {"neighbours", "short", "long"}
HIT = {"repeat", "prefix"}
ANYWHERE = set(NAMES)
DEFECTS = {
    "batched": (CROWDED, {*CROWDED, "abort", "restart"}),
    "short": ({"short"}, {"short", "neighbours"}),
    "long": ({"long"}, {"long"}),
    "hit": (HIT, ANYWHERE - {"cold", "cached", "usage", "seeds"}),
    "part of a hit": ({"prefix"}, ANYWHERE - {"repeat", "cold", "cached", "usage", "seeds"}),
    "recomputed": ({"evicted"}, ANYWHERE - {"repeat", "cached", "usage", "seeds"}),
    "abort": ({"abort"}, ANYWHERE - {"repeat", "cold", "prefix", *CROWDED, "cached", "usage"}),
    "resume": ({"resume"}, {"resume"}),
    "samples": ({"samples"}, {"samples"}),
    "seed": ({"repeat", "cold", *CROWDED, "abort", "samples", "evicted"}, ANYWHERE),
    "salts": ({"salts", "cached"}, {"salts", "cached"}),
    "cached": ({"cached"}, {"cached"}),
    "usage": ({"usage"}, {"usage"}),
}
"""The checks that must find each defect, and those that may."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_by_its_check(conform: ConformCommand, defect: str) -> None:
    must, may = DEFECTS[defect]
    with fake(FakeManners(defect=defect)) as url:
        found = conform(url)
    assert found.status == 1, found.out
    assert must <= found.having("differs") <= may, found.out
    assert not found.having("no verdict")
    if defect == "seed":
        assert "differs" not in found.outcomes("repeat")["greedy"]
    if must & {"neighbours", "repeat", "prefix", "short", "long"}:
        (line, *_) = found.lines(min(must & found.having("differs")))
        assert "token 3: here " in line or defect == "seed"
        assert "(-" in line.split("alone")[1]  # the log probability


def test_a_restart_that_changes_answers_is_found(conform: ConformCommand, tmp_path: Path) -> None:
    restarts = tmp_path / "restarts"
    flags = ("--check", "restart", "--check", "repeat", "--restart-command")
    with fake(FakeManners(defect="restart", restarts=restarts)) as url:
        found = conform(url, *flags, f"echo x >> {restarts}")
    assert (found.status, found.having("differs")) == (1, {"restart"})
    assert any("after restart 1: token 3: here" in line for line in found.lines("restart"))


def test_a_server_that_does_not_come_back_gives_no_verdict(conform: ConformCommand) -> None:
    flags = ("--check", "restart", "--check", "repeat", "--restart-command")
    with fake(FakeManners()) as url:
        found = conform(url, *flags, "exit 3")
    assert (found.status, found.having("no verdict")) == (2, {"restart"})
    assert "the restart command ended with status 3" in found.said


def test_equal_tokens_with_other_log_probabilities_are_said(conform: ConformCommand) -> None:
    with fake(FakeManners(defect="logprobs")) as url:
        found = conform(url, "--check", "neighbours", "--check", "repeat")
    assert (found.status, found.having("exact")) == (0, {"neighbours", "repeat"})
    gaps = {row["name"]: row["greedy"]["logprob_gap"] for row in found.json["checks"]}
    assert gaps == {"repeat": 0.0, "neighbours": pytest.approx(0.25)}
    assert "differ by up to 0.25" in found.said


PLAIN = frozenset(
    {"return_token_ids", "logprobs", "cache_salt", "salt", "cached", "n", "ignore_eos"}
)


@pytest.mark.parametrize(
    "more", [set(), {"ids"}, {"ids", "completions"}, {"stream_options", "usage"}]
)
@pytest.mark.parametrize("defect", ["", "batched"])
def test_a_server_with_few_abilities_is_compared_as_well_as_it_can_be(
    conform: ConformCommand, more: set[str], defect: str
) -> None:
    with fake(FakeManners(defect=defect, lacks=PLAIN | more)) as url:
        found = conform(url)
    lacking = {"cold", "prefix", "resume", "samples", "salts", "cached"}
    lacking |= {"usage"} & more
    assert found.having("not supported") == lacking, found.out
    assert found.having("not tried") == {"restart"}
    assert found.status == (1 if defect else 0)
    assert bool(found.having("differs") & CROWDED) == bool(defect)
    if defect:
        assert "character " in found.lines("neighbours")[0]
    assert "refused: ['n']" in found.out


NO_IDS = frozenset({"return_token_ids", "ids"})


@pytest.mark.parametrize("silent", ["all", "empty"])
@pytest.mark.parametrize("lacks", [NO_IDS | {"logprobs"}, NO_IDS, PLAIN | {"ids"}])
def test_answers_without_text_are_not_compared(
    conform: ConformCommand, silent: str, lacks: frozenset[str]
) -> None:
    """They could stand for any tokens: equal ones say nothing, and no usage contradicts them."""
    with fake(FakeManners(silent=silent, lacks=lacks)) as url:
        found = conform(url)
    told = {"usage", "cached", "salts"} - ({"cached", "salts"} if "salt" in lacks else set())
    assert found.having("exact") == told, found.out
    assert found.having("not supported") == set(NAMES) - told - {"restart"}
    assert found.status == 0
    assert "no answer had text or token ids" in found.said
    assert "one request at a time" not in found.said


def test_token_ids_without_text_are_compared(conform: ConformCommand) -> None:
    with fake(FakeManners(silent="all", defect="hit")) as url:
        found = conform(url, "--check", "repeat", "--check", "cold")
    assert (found.having("differs"), found.having("exact")) == ({"repeat"}, {"cold"})
    assert "token 3: here " in found.lines("repeat")[0]


def test_some_answers_without_text_are_said(conform: ConformCommand) -> None:
    lacks = NO_IDS | {"logprobs"}
    with fake(FakeManners(silent="some", lacks=lacks)) as url:
        found = conform(url, "--check", "repeat", "--check", "usage", "--prompts", 8)
    assert (found.status, found.having("exact")) == (0, {"repeat", "usage"}), found.out
    (repeat, _) = found.json["checks"]
    for kind in ("greedy", "sampled"):
        assert 0 < repeat[kind]["untold"] < 8
        assert repeat[kind]["compared"] == 8 - repeat[kind]["untold"]
    assert "pairs without text or token ids were not compared" in found.said


@pytest.mark.parametrize("lacks", [NO_IDS | {"logprobs"}, NO_IDS, frozenset[str]()])
def test_text_on_one_side_only_is_a_difference(
    conform: ConformCommand, lacks: frozenset[str]
) -> None:
    with fake(FakeManners(silent="crowd", lacks=lacks)) as url:
        found = conform(url, "--check", "neighbours", "--check", "repeat")
    assert found.having("differs") == ({"neighbours"} if lacks else set()), found.out
    assert found.having("exact") == ({"repeat"} if lacks else {"repeat", "neighbours"})


def test_unknown_fields_that_are_ignored_are_no_abilities(conform: ConformCommand) -> None:
    """As llama.cpp does: everything is taken, and nothing of it is done."""
    with fake(FakeManners(lacks=frozenset({"salt"}))) as url:
        found = conform(url, "--check", "salts", "--check", "repeat")
    assert (found.status, found.having("not supported")) == (0, {"salts"})
    assert "does not know the field" in found.said


def test_samples_that_do_not_come_are_not_supported(conform: ConformCommand) -> None:
    """As in transformers serve: ``n`` is taken, and one answer comes."""
    with fake(FakeManners(lacks=frozenset({"samples"}))) as url:
        found = conform(url, "--check", "samples", "--check", "repeat")
    assert (found.status, found.having("not supported")) == (0, {"samples"})
    assert "1 of 3 samples came" in found.said


def test_a_server_that_answers_one_at_a_time_has_no_neighbours(conform: ConformCommand) -> None:
    with fake(FakeManners(lacks=frozenset({"concurrency"}))) as url:
        found = conform(url, "--check", "neighbours", "--check", "repeat")
    assert (found.status, found.having("not supported")) == (0, {"neighbours"})
    assert "one request at a time" in found.out


def test_what_was_left_out_is_not_tried(conform: ConformCommand) -> None:
    with fake(FakeManners()) as url:
        found = conform(url, "--no-sampled", "--check", "repeat", "--check", "restart")
    assert found.status == 0
    assert found.outcomes("repeat") == {"greedy": "exact", "sampled": "not tried"}
    assert found.outcomes("restart") == {"greedy": "not tried"}


def test_a_server_without_seeds_is_examined_greedily(conform: ConformCommand) -> None:
    with fake(FakeManners(lacks=frozenset({"seed"}))) as url:
        found = conform(url, "--check", "repeat", "--check", "usage")
    assert found.outcomes("repeat") == {"greedy": "exact", "sampled": "not supported"}
    assert found.status == 0


def test_a_sampled_resume_that_differs_is_found_among_equal_ones(conform: ConformCommand) -> None:
    """Without other checks, so that the seed decides all cuts."""
    with fake(FakeManners(defect="late resumes")) as url:
        found = conform(url, "--check", "resume", "--prompts", 4)
    assert found.outcomes("resume") == {"greedy": "exact", "sampled": "differs"}
    assert found.status == 1


def test_draws_that_begin_anew_are_no_difference(conform: ConformCommand) -> None:
    with fake(FakeManners(lacks=frozenset({"draws that go on"}))) as url:
        found = conform(url, "--check", "resume")
    assert found.outcomes("resume") == {"greedy": "exact", "sampled": "not supported"}
    assert found.status == 0
    assert "draws begin anew" in found.said


def test_seeds_that_are_ignored_are_said(conform: ConformCommand) -> None:
    """Although each sampled answer is another one than the greedy answer."""
    with fake(FakeManners(lacks=frozenset({"other seeds"}))) as url:
        found = conform(url, "--check", "seeds", "--check", "repeat")
    assert found.outcomes("seeds")["sampled"] == "not supported"
    assert "seeds are ignored" in found.said


def test_a_crowd_that_is_interrupted_leaves_no_task() -> None:
    async def run() -> None:
        asked = asyncio.Event()

        class Silent:
            async def ask(
                self,
                request: LoadRequest,
                timeout: float,  # noqa: ASYNC109 - as the real one has it
            ) -> AsyncGenerator[AnswerPiece, None]:
                asked.set()
                await asyncio.Event().wait()
                yield AnswerPiece(0.0)

        plan = ConformPlan(prompt=LengthDraw("fixed", (8,)))
        exam = Exam(cast(HttpDoor, Silent()), Abilities(), plan)
        crowd = asyncio.create_task(Crowd(exam, plan.prompt, 4).__aenter__())
        await asked.wait()
        crowd.cancel()
        with pytest.raises(asyncio.CancelledError):
            await crowd
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_small_flood_proves_nothing_about_eviction(conform: ConformCommand) -> None:
    with fake(FakeManners()) as url:
        found = conform(url, "--check", "evicted", "--check", "repeat", "--flood", 512)
    assert (found.status, found.having("not supported")) == (0, {"evicted"})
    assert "evicted nothing; raise --flood" in found.said


def test_a_prompt_may_be_cached_by_another_replica(conform: ConformCommand) -> None:
    """Asked once more, each of three prompts meets the replica that does not have it."""
    with fake(FakeManners(replicas=2)) as url:
        found = conform(url, "--check", "evicted", "--check", "salts", "--prompts", 3)
    assert (found.status, found.having("exact")) == (0, {"evicted", "salts"}), found.out


def test_a_server_that_breaks_lacks_nothing(conform: ConformCommand) -> None:
    """Only a refusal says that there is no such ability."""
    with stub(lambda at: StubManners(cut_after=1) if at == 2 else GOOD) as server:
        found = conform(server.url, "--check", "repeat")
    assert found.status == 2
    assert "the server closed the connection" in found.err
    assert not found.json["server"]


@pytest.mark.parametrize("broken", [True, False])
def test_a_server_that_answers_nothing_gives_no_verdict(
    conform: ConformCommand, broken: bool
) -> None:
    with fake(FakeManners(defect="broken")) as url:
        found = conform(url if broken else "http://127.0.0.1:9")
    assert found.status == 2
    assert len(found.err.splitlines()) == 1
    assert "There is no verdict." in found.out


def test_nothing_but_unsupported_checks_is_no_verdict(conform: ConformCommand) -> None:
    with fake(FakeManners(lacks=PLAIN)) as url:
        found = conform(url, "--check", "salts")
    assert (found.status, found.having("not supported")) == (2, {"salts"})


def test_the_page_needs_nothing_else(conform: ConformCommand, tmp_path: Path) -> None:
    page = tmp_path / "conform.html"
    with fake(FakeManners(defect="hit")) as url:
        conform(url, "--check", "repeat", "--check", "cold", "--html", page)
    text = page.read_text()
    assert "differs (2 of 2)" in text
    assert "The server is not exact." in text
    for outside in ("src=", "href=", "http://www", "https://", "@import", "<script"):
        assert outside not in text


def test_the_help_fits_a_terminal(conform: ConformCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = conform("--help")
    assert found.status == 0
    own = found.out.split("Every option can be set")[0]
    assert max(map(len, own.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "named"),
    [(("--check", "nothing"), "check"), (("--prompt", "x"), "prompt"), (("--output", 1), "output")],
)
def test_a_wrong_option_is_refused(
    conform: ConformCommand, flags: tuple[object, ...], named: str
) -> None:
    found = conform("http://127.0.0.1:9", *flags)
    assert (found.status, len(found.err.splitlines())) == (2, 1)
    assert named in found.err
