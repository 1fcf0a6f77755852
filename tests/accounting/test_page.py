"""The page of the proof says what the run found, and is left alone by a part of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accounting.mutations import ROOT
from tests.accounting.page import CaseRun, MutationRun, ProofRun, main, page, summary

RUN = ProofRun(
    states=[
        CaseRun(
            case="small",
            states=1_200,
            transitions=9_000,
            depth=7,
            closed=True,
            bound=1_400,
            news=[1_200, 0],
            events={"submit": 10},
        ),
        CaseRun(
            case="large",
            states=1_500,
            transitions=20_000,
            depth=5,
            closed=False,
            bound=1_400,
            news=[1_000, 500],
            events={"submit": 5, "abort": 3},
        ),
    ],
    mutations=[
        MutationRun(file="request", name="one", caught="test_a", survives=None),
        MutationRun(file="blocks", name="two", caught=None, survives="equal: because"),
    ],
)


def test_every_number_is_that_of_the_run() -> None:
    told = page(RUN)
    assert "| small | 1,200 | 9,000 | 7 | complete |" in told
    assert "| large | 1,500 | 20,000 | 5 | 1,400; +50% |" in told
    assert "2,700 states, 29,000 transitions" in told
    assert "submit 15, schedule 0" in told
    assert "| blocks | two | survives: equal: because |" in told
    assert "1 of 2 mutations caught. The other 1 change nothing" in told
    short = summary(RUN)
    assert "**2,700 distinct states, 29,000 transitions**, 2 cases, 1 of them complete" in short
    assert "to a depth of 5 to 5 events" in short
    assert "`test_a` 1" in short


def test_a_part_of_a_run_leaves_the_pages_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [ROOT / "docs" / name for name in ("proof.md", "accounting.md")]
    before = [path.read_text(encoding="utf-8") for path in pages]
    run = tmp_path / "run.json"
    run.write_text(json.dumps(RUN))
    assert main([str(run)]) == 0
    assert "stay as they are" in capsys.readouterr().out
    assert [path.read_text(encoding="utf-8") for path in pages] == before
    assert before[1].count("<!-- numbers of the run -->") == before[1].count("<!-- end -->") == 1
