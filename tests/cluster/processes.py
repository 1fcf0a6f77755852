"""Helpers of tests that start processes: wait for a condition, check a process id, find ports."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import wanted_ports

_NEVER = threading.Event()


def until(
    condition: Callable[[], bool], what: str | Callable[[], str], timeout: float = 20.0
) -> None:
    """Polls for a condition without an event, such as the end of another's child process."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            said = what if isinstance(what, str) else what()
            pytest.fail(f"after {timeout:g} s still not: {said}")
        _NEVER.wait(0.02)


def free_beside(specs: Sequence[ProcessSpec], count: int) -> list[int]:
    """Free ports that the processes of a cluster, not started yet, do not want."""
    return free_ports(count, without={wanted.port for wanted in wanted_ports(specs)})


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):  # the first also if it ends while it is read
        return False
    except PermissionError:
        return True
    return state != "Z"
