"""The memory that this process may use: that of the machine, or of its control group (container).

A limit of a control group (version 1 or 2) counts like installed memory. Linux only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Rejected
from kvrelay.process.cgroup import CGROUP, PROC, group_folders

VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. ``free`` includes what the kernel would give back, such as cached files."""

    total: int
    free: int


def host_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> HostMemory | None:
    """``None`` on a system that does not show it."""
    try:
        own = _numbers(proc / "meminfo")
        found = HostMemory(own["MemTotal"] * 1024, own["MemAvailable"] * 1024)
    except (OSError, KeyError):
        return None
    for group in _groups(proc, cgroup):
        found = HostMemory(min(found.total, group.total), min(found.free, group.free))
    return found


def check_fits(field: str, size: int, memory: HostMemory | None) -> str | None:
    """``Rejected`` if the machine has less memory than ``size``; a warning if less is free.

    Memory is taken when it is first written: too large a process starts, and is killed later.
    """
    if memory is None or size <= memory.free:
        return None
    free = f"{_gib(memory.free)} of {_gib(memory.total)} are free"
    if size > memory.total:
        raise Rejected(field, f"{_gib(size)} is more memory than there is here: {free}")
    return f"{field}: {_gib(size)} of memory are asked for, and {free}: it may be killed"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _groups(proc: Path, cgroup: Path) -> Iterator[HostMemory]:
    """The limits of every control group that this process is in, from the innermost outwards."""
    for folder, version in group_folders("memory", proc, cgroup):
        limit = _limit(folder, *(VERSION_2 if version == 2 else VERSION_1))
        if limit is not None:
            yield limit


def _limit(folder: Path, limit: str, usage: str, reclaimable: str) -> HostMemory | None:
    """``None`` without a limit, or if the group cannot be seen from here."""
    try:
        total = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        files = _numbers(folder / "memory.stat").get(reclaimable, 0)
    except (OSError, ValueError):  # ValueError: "max"
        return None
    return HostMemory(total, max(0, total - max(0, used - files)))


def _numbers(path: Path) -> dict[str, int]:
    """The second word of each line by its first one."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
