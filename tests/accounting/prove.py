"""``python -m tests.accounting.prove``: explore the large cases, then apply every mutation.

Prints what was visited and which test caught which mutation; the status is 1 if anything broke.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.accounting.cases import CASES, SMALL
from tests.accounting.events import Broken
from tests.accounting.explore import Explorer, Found
from tests.accounting.mutate import run_all, survivors
from tests.accounting.mutations import Mutation
from tests.accounting.page import CaseRun, MutationRun, ProofRun


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prove", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the cases of the test suite")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    parser.add_argument(
        "--states", type=int, default=250_000, help="no further level of a case beyond so many"
    )
    parser.add_argument(
        "--only", choices=("states", "mutations"), help="one half; without it, both"
    )
    parser.add_argument("--save", metavar="FILE", help="write the run there, for the pages")
    given = parser.parse_args(argv)
    good, run = True, ProofRun(states=[], mutations=[])
    if given.only != "mutations":
        names = [case.name for case in (SMALL if given.small else CASES)]
        good, found = explore(names, given.processes, given.states)
        order = {name: place for place, name in enumerate(names)}
        found.sort(key=lambda one: order[one.case])
        run["states"] = [_case(one) for one in found]
    if given.only != "states":
        verdicts = run_all(given.processes)
        good = good and not survivors(verdicts)
        run["mutations"] = [_mutation(*one) for one in verdicts]
    if given.save is not None:
        Path(given.save).write_text(json.dumps(run, indent=1), encoding="utf-8")
    return 0 if good else 1


def _case(found: Found) -> CaseRun:
    return CaseRun(
        case=found.case,
        states=found.states,
        transitions=found.transitions,
        depth=found.depth,
        closed=found.closed,
        bound=found.bound,
        news=found.news,
        events=dict(found.events),
    )


def _mutation(mutation: Mutation, caught: str | None) -> MutationRun:
    file = mutation.module.removeprefix("kvrelay.engine.core.")
    return MutationRun(file=file, name=mutation.name, caught=caught, survives=mutation.survives)


def explore(names: Sequence[str], processes: int, most: int) -> tuple[bool, list[Found]]:
    """Every named case, some at once; the largest first. False if one broke."""
    print(f"every state of {len(names)} cases; all of it is enumerated, nothing is drawn by chance")
    started = time.perf_counter()
    with get_context("spawn").Pool(processes) as pool:
        jobs = [(name, most) for name in reversed(names)]
        good, found = _tell(pool.imap_unordered(_explore, jobs))
    seconds = time.perf_counter() - started
    states, transitions = sum(one.states for one in found), sum(one.transitions for one in found)
    print(f"{states:,} states, {transitions:,} transitions, {seconds:.0f} s")
    for event in ("submit", "schedule", "commit", "discard", "loaded", "saved", "abort"):
        print(f"  {event:<9}{sum(one.events[event] for one in found):>12,}")
    return good, found


def _tell(results: Iterable[Found | str]) -> tuple[bool, list[Found]]:
    found: list[Found] = []
    good = True
    for result in results:
        if isinstance(result, Found):
            found.append(result)
            print(result.line(), flush=True)
        else:
            good = False
            print(f"BROKEN {result}", flush=True)
    return good, found


def _explore(job: tuple[str, int]) -> Found | str:
    name, most = job
    case = next(case for case in CASES if case.name == name)
    try:
        return Explorer(case, most).run(_tell_level)
    except Broken as error:
        return f"{name}: {error}"


def _tell_level(found: Found) -> None:
    """On the other stream, for who waits: a large level takes minutes."""
    print(f"  {found.line()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
