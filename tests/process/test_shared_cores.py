"""Workers that share cores by a file: each of them is a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from kvrelay.process import shared_cores
from kvrelay.process.shared_cores import SharedCores, SharedCoresFile

PROGRAM = """
import sys
from kvrelay.process.shared_cores import SharedCores
path, share, cores = sys.argv[1], *map(int, sys.argv[2:])
shared = SharedCores(path, share, cores)
print("open", flush=True)
for line in sys.stdin:
    method, *given = line.split()
    print(getattr(shared, method)(*map(int, given)), flush=True)
"""


class Worker:
    """Another process that shares the cores."""

    def __init__(self, path: Path | str, share: int = 1, cores: int = 8) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), str(share), str(cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "open"

    def compute(self, most: int = 8) -> int:
        return int(self._ask(f"compute {most}"))

    def rest(self) -> None:
        self._ask("rest")

    def end(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()

    def _ask(self, method: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def worker(path: Path | str, share: int = 1, cores: int = 8) -> Iterator[Worker]:
    made = Worker(path, share, cores)
    try:
        yield made
    finally:
        made.end()


def test_a_worker_that_computes_alone_uses_all_cores(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    with worker(path) as first, worker(path) as second, worker(path) as third:
        assert first.compute() == 8
        assert second.compute() == 4
        assert first.compute() == 4
        assert third.compute() == 2
        first.rest()
        assert second.compute() == 4
        third.rest()
        assert second.compute() == 8
        assert path.stat().st_mode & 0o777 == 0o600


def test_never_fewer_than_its_own_nor_more_than_the_step_uses(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    with worker(path, 3) as first, worker(path, 1) as second, worker(path, 1) as third:
        assert second.compute(5) == 5
        assert second.compute(1) == 1
        assert second.compute(8) == 8
        third.compute()
        assert first.compute() == 3
        assert third.compute() == 2


def test_a_restarted_worker_takes_the_place_of_the_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    with worker(path) as first, worker(path) as second:
        second.compute()
        second.end()
        assert first.compute() == 4  # what the killed one has left
        with worker(path) as third:
            assert first.compute() == 8
            third.compute()
            assert first.compute() == 4


def test_the_cores_of_all_killed_workers_come_back(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    with ExitStack() as stack:
        killed = [stack.enter_context(worker(path)) for _ in range(4)]
        for each in killed:
            each.compute()
            each.end()
        with worker(path) as other:
            assert other.compute() == 8


@pytest.mark.parametrize("text", ["do not overwrite", "\0" * 256 + "nor this"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(Rejected, match=r"shared_cores.*notes': it has other content: name a new"):
        SharedCores(str(path), 1, 8)
    assert path.read_text() == text


def test_a_closed_worker_uses_no_core(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    with worker(path) as other:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
        with closing(SharedCores(str(path), 1, 8)) as shared:
            assert shared.compute(8) == 8
            assert other.compute() == 4
        assert other.compute() == 8
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) == before


def test_as_many_workers_as_there_are_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "WORKERS", 2)
    path = tmp_path / "cores"
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(worker(path))
        os.truncate(path, 2)  # theirs has 256 places
        with pytest.raises(Rejected, match=r"shared_cores.*2 workers share it already"):
            SharedCores(str(path), 1, 8)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "cores", tmp_path):
        with pytest.raises(Rejected, match=re.escape(f"shared_cores: {str(path)!r}: ")):
            SharedCores(str(path), 1, 8)
    with pytest.raises(Rejected, match=r"shared_cores: '': .* name a new file"):
        SharedCores("", 1, 8)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(Rejected, match=f"{path}': it is not a file"):
            SharedCores(path, 1, 8)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has files in memory")
def test_the_file_of_a_cluster_is_in_memory_and_ends_with_it() -> None:
    file = SharedCoresFile()
    assert file.path is not None
    with worker(file.path) as first, worker(file.path) as second:
        assert first.compute() == 8
        assert second.compute() == 4
        path = file.path
        file.close()
        file.close()
        assert not os.path.exists(path)
        first.rest()
        assert second.compute() == 8  # what is mapped stays
