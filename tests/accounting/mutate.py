"""Apply mutations, each in a process of its own, and say which test catches it.

``python -m tests.accounting.mutate NUMBER TEST...`` runs tests over one mutated copy of the core:
the source on disk is never touched, the import is answered with the mutated text.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from tests.accounting.mutations import MUTATIONS, ROOT, Mutation

# In this order, until one fails: what is named first, what is searched last.
TESTS = (
    "tests/accounting/test_founding_bugs.py",
    "tests/accounting/test_core.py",
    "tests/accounting/test_saves.py",
    "tests/accounting/test_missed.py",
    "tests/accounting/test_foresight.py",
    "tests/accounting/test_undisturbed.py",
    "tests/accounting/test_liveness.py",
    "tests/accounting/test_thrashing.py",
    "tests/accounting/test_queue.py",
    "tests/accounting/test_storm.py",
    "tests/accounting/test_exhaustive.py",
)
LIMIT = 300.0
ATTEMPTS = 3
CAUGHT = "caught by "


class MutantLoader(SourceFileLoader):
    """Compiles the mutated text, and never a cached one."""

    def __init__(self, mutation: Mutation) -> None:
        super().__init__(mutation.module, str(mutation.path))
        self._mutation = mutation

    def get_code(self, fullname: str) -> CodeType:
        source = self._mutation.apply(self._mutation.path.read_text(encoding="utf-8"))
        return compile(source, self.path, "exec")


class MutantFinder(MetaPathFinder):
    """Answers the import of one module."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        loader = MutantLoader(self._mutation)
        return spec_from_file_location(fullname, self._mutation.path, loader=loader)


Verdicts = list[tuple[Mutation, str | None]]


def survivors(verdicts: Verdicts) -> list[str]:
    """Names of those that no test caught and nothing explains."""
    return [one.name for one, test in verdicts if test is None and one.survives is None]


def run_all(processes: int = 2) -> Verdicts:
    """Every mutation and the test that caught it; a line each."""
    print(f"{len(MUTATIONS)} mutations of the core, each run until a test catches it")
    started = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        caught = list(pool.map(_tell, range(len(MUTATIONS))))
    verdicts = list(zip(MUTATIONS, caught, strict=True))
    print(
        f"{sum(test is not None for test in caught)} of {len(MUTATIONS)} caught,"
        f" {time.perf_counter() - started:.0f} s"
        + "".join(f"\nSURVIVED {name}" for name in survivors(verdicts))
    )
    return verdicts


def _tell(number: int) -> str | None:
    mutation, test = MUTATIONS[number], catch(number)
    file = mutation.module.removeprefix("kvrelay.engine.core.")
    verdict = test or f"survives: {mutation.survives or 'NO TEST CATCHES IT'}"
    print(f"| {file} | {mutation.name} | {verdict} |", flush=True)
    return test


def catch(number: int, *tests: str) -> str | None:
    """The test that catches a mutation, run in a process of its own; ``None`` if none does.

    A process that ends without a verdict, killed for example, runs again; then it is an error.
    """
    command = [sys.executable, "-m", "tests.accounting.mutate", str(number), *tests]
    for _ in range(ATTEMPTS):
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end after {LIMIT:.0f} s"
        lines = [line for line in done.stdout.splitlines() if line.startswith(CAUGHT)]
        if lines:
            return lines[-1].removeprefix(CAUGHT)
        if done.returncode == 0:
            return None
    raise RuntimeError(f"mutation {number}: status {done.returncode}, {done.stderr[-1000:]}")


class Recorder:
    """A pytest plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.first: str | None = None

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and self.first is None:
            self.first = str(getattr(report, "nodeid", "a test"))


def main(number: int, tests: Sequence[str]) -> int:
    import pytest

    sys.meta_path.insert(0, MutantFinder(MUTATIONS[number]))
    recorder = Recorder()
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *(tests or TESTS)]
    status = pytest.main(options, plugins=[recorder])
    if status != pytest.ExitCode.OK:
        print(f"\n{CAUGHT}{(recorder.first or 'the import').split('::')[-1]}", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
