"""The memory of the machine and of control groups, from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from kvrelay.process.memory import HostMemory, check_fits, host_memory

GIB = 1 << 30
MACHINE = HostMemory(16 * GIB, 12 * GIB)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A ``/proc`` of a machine with 16 GiB, 12 of them free."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    kib = {"MemTotal": 16 << 20, "MemFree": 1 << 20, "MemAvailable": 12 << 20}
    lines = [f"{name}:       {value} kB" for name, value in kib.items()]
    (folder / "meminfo").write_text("\n".join([*lines, "HugePages_Total:       0"]))
    return folder


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text + "\n")


def test_the_machine_alone(proc: Path, tmp_path: Path) -> None:
    assert host_memory(proc, tmp_path / "none") == MACHINE
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert host_memory(proc, tmp_path / "none") == MACHINE


def test_the_tightest_group_of_version_2_counts(proc: Path, tmp_path: Path) -> None:
    """The limit is on an outer group; cached files of it are free."""
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    group(root / "pod" / "box", max="max", current="1", stat="inactive_file 0")
    group(root / "pod", max=str(4 * GIB), current=str(3 * GIB), stat=f"inactive_file {GIB}")
    assert host_memory(proc, root) == HostMemory(4 * GIB, 2 * GIB)


def test_a_group_of_version_1(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("9:name=systemd:/x\n4:cpu,memory:/box\n0::/\n")
    group(
        root / "memory" / "box",
        limit_in_bytes=str(8 * GIB),
        usage_in_bytes=str(9 * GIB),
        stat=f"total_inactive_file {GIB // 2}",
    )
    group(root / "memory", limit_in_bytes=str(1 << 62), usage_in_bytes="5", stat="x 1")
    assert host_memory(proc, root) == HostMemory(8 * GIB, 0)


def test_what_does_not_fit_is_refused_or_warned_about() -> None:
    assert check_fits("budget", MACHINE.free, MACHINE) is None
    assert check_fits("budget", 1 << 60, None) is None
    warning = check_fits("budget", MACHINE.free + 1, MACHINE)
    assert warning is not None
    assert "12.0 GiB of 16.0 GiB are free" in warning
    with pytest.raises(Rejected, match=r"^budget: 900.0 GiB is more .* 12.0 GiB of 16.0 GiB"):
        check_fits("budget", 900 * GIB, MACHINE)


def test_a_system_without_these_files(tmp_path: Path) -> None:
    assert host_memory(tmp_path, tmp_path) is None
