"""``python -m tests.accounting.page RUN``: docs/proof.md and the numbers of docs/accounting.md.

``RUN`` is the file that ``tests.accounting.prove --save RUN`` wrote; no number is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tests.accounting.cases import CASES
from tests.accounting.mutations import MUTATIONS, ROOT

EVENTS = ("submit", "schedule", "commit", "discard", "loaded", "saved", "abort")
SHOWN = 4


class CaseRun(TypedDict):
    """What the exploration of one case found; ``news`` are the new states of each level.

    No further level was begun beyond ``bound`` states.
    """

    case: str
    states: int
    transitions: int
    depth: int
    closed: bool
    bound: int
    news: list[int]
    events: dict[str, int]


class MutationRun(TypedDict):
    """What became of one mutation."""

    file: str
    name: str
    caught: str | None
    survives: str | None


class ProofRun(TypedDict):
    """A whole run."""

    states: list[CaseRun]
    mutations: list[MutationRun]


def page(run: ProofRun) -> str:
    """docs/proof.md."""
    cases = "\n".join(_case(case) for case in run["states"])
    kinds = ", ".join(
        f"{event} {sum(case['events'].get(event, 0) for case in run['states']):,}"
        for event in EVENTS
    )
    return f"""# Results of `make prove`

Written by the run itself. Cases: `tests/accounting/cases.py`; mutations:
`tests/accounting/mutations.py`; [accounting](accounting.md) says what is checked.

| case | states | transitions | depth | bound |
|---|---|---|---|---|
{cases}

{_total(run, "states")} states, {_total(run, "transitions")} transitions. Depth is the number of \
events. `complete`: no further
state exists. Otherwise every order of that many events was explored, and no further event once
there were as many states as the bound; the last event added so many percent.

Transitions by kind, without the fair continuations:
{kinds}.

{_verdict(run)} `python -m tests.accounting.prove --only mutations` names the test that caught each.

| file | mutations | tests that fail first, most often |
|---|---|---|
{chr(10).join(_file(file, run) for file in sorted({one["file"] for one in run["mutations"]}))}
{_survivors(run)}"""


def summary(run: ProofRun) -> str:
    """The sentences of docs/accounting.md."""
    closed = [case for case in run["states"] if case["closed"]]
    others = [case["depth"] for case in run["states"] if not case["closed"]]
    depths = f", the others to a depth of {min(others)} to {max(others)} events" if others else ""
    first = Counter(one["caught"] for one in run["mutations"] if one["caught"]).most_common(SHOWN)
    named = ", ".join(f"`{test}` {count}" for test, count in first)
    return (
        f"The last full run: **{_total(run, 'states')} distinct states,"
        f" {_total(run, 'transitions')} transitions**, {len(run['states'])} cases, {len(closed)} of"
        f" them complete\n(no state lies beyond){depths}; nothing broken.\n"
        f"**{_verdict(run)}** First to fail, most often:\n{named}."
    )


def is_whole(run: ProofRun) -> bool:
    """Whether every case and every mutation is in it."""
    cases = {case["case"] for case in run["states"]}
    mutations = {one["name"] for one in run["mutations"]}
    return cases == {case.name for case in CASES} and mutations == {one.name for one in MUTATIONS}


def _case(case: CaseRun) -> str:
    reach = "complete" if case["closed"] else f"{case['bound']:,}; +{_growth(case):.0%}"
    return (
        f"| {case['case']} | {case['states']:,} | {case['transitions']:,} | {case['depth']} |"
        f" {reach} |"
    )


def _growth(case: CaseRun) -> float:
    """States that the last level added, as a part of all before it."""
    return case["news"][-1] / (case["states"] - case["news"][-1])


def _file(file: str, run: ProofRun) -> str:
    mutations = [one for one in run["mutations"] if one["file"] == file]
    first = Counter(one["caught"] for one in mutations if one["caught"]).most_common(SHOWN)
    named = ", ".join(f"`{test}` {count}" for test, count in first)
    return f"| {file} | {len(mutations)} | {named} |"


def _survivors(run: ProofRun) -> str:
    """A table of the mutations that no test caught, if there are any."""
    rows = [
        f"| {one['file']} | {one['name']} | survives: {one['survives']} |\n"
        for one in run["mutations"]
        if one["caught"] is None
    ]
    return "\n| file | mutation | why |\n|---|---|---|\n" + "".join(rows) if rows else ""


def _total(run: ProofRun, field: str) -> str:
    values = [case["states" if field == "states" else "transitions"] for case in run["states"]]
    return f"{sum(values):,}"


def _verdict(run: ProofRun) -> str:
    caught = sum(one["caught"] is not None for one in run["mutations"])
    left = len(run["mutations"]) - caught
    rest = f" The other {left} change nothing that can be seen, and say why." if left else ""
    return f"{caught} of {len(run['mutations'])} mutations caught.{rest}"


def main(argv: Sequence[str]) -> int:
    """Write both pages."""
    run: ProofRun = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    if not is_whole(run):
        print("not every case and mutation was run: the pages stay as they are")
        return 0
    (ROOT / "docs" / "proof.md").write_text(page(run), encoding="utf-8")
    other = ROOT / "docs" / "accounting.md"
    told = other.read_text(encoding="utf-8")
    pattern = r"(?<=<!-- numbers of the run -->\n).*?(?=\n<!-- end -->)"
    changed, count = re.subn(pattern, lambda _: summary(run), told, count=1, flags=re.DOTALL)
    if count != 1:
        raise ValueError("docs/accounting.md has no place for the numbers of the run")
    other.write_text(changed, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
