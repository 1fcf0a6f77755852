"""The cores that this process may use, the threads of a model, and variables that torch reads.

The cores are those of the affinity mask, bounded by the processor quota of a control group.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvrelay.process.cgroup import CGROUP, PROC, group_folders

BYTES_A_THREAD = 32 << 20
"""Of weights. A step wakes the threads some ten times a layer: on weights that one thread reads in
a few milliseconds that costs more than a second thread saves (benchmarks/README.md)."""

POSITIONS = 32
"""Of a step: their products take about as long as it takes to read the weights."""

MOST_THREADS = 8
"""By default: as many as the tests compare to the bit, wherever a prompt is cut."""

SPINS = 10_000
"""Loops, 0.2 to 0.5 ms: a step has no longer gaps.

A decode step of the Qwen3-0.6B shape took 64 ms with these, 76 ms with 1,000 loops and 64 ms with
100,000 (16 streams: 101, 117 and 115 ms), on two quiet cores.
"""

_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

T = TypeVar("T")


def available_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """At least one. A quota of two and a half cores counts as two."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([known or 1, *(int(quota) for quota in _quotas(proc, cgroup))]))


def model_threads(weight_bytes: int, cores: int, workers: int = 1, positions: int = 1) -> int:
    """Threads of one of so many workers on these cores, for a step of so many positions.

    A small model has one, except in long steps.
    """
    share = max(1, cores // workers)
    work = weight_bytes * max(1, positions // POSITIONS)
    return min(share, max(1, work // BYTES_A_THREAD), MOST_THREADS)


def set_torch_variables(environ: MutableMapping[str, str] | None = None) -> None:
    """Bound how long OpenMP threads spin for work, and ask for huge pages.

    Call it before torch is imported; what the environment says is kept. The libgomp of torch spins
    300,000 loops, which is milliseconds on a core that the router or the store may need. Tensors of
    2 MiB and more are in huge pages where the system grants them: a decode step, which reads every
    weight, took 63 ms instead of 66 (Qwen3-0.6B shape, AVX2).
    """
    given = os.environ if environ is None else environ
    if not any(name in given for name in _SPINNING):
        given["GOMP_SPINCOUNT"] = str(SPINS)
    given.setdefault(_HUGE_PAGES, "1")


def in_passing_thread(function: Callable[[], T]) -> T:
    """What the function returns or raises, called in a thread that ends with it.

    Every thread that computes with torch has an OpenMP team of its own for as long as it lives. As
    soon as the teams have more threads than the process has cores, libgomp spins 100 loops whatever
    ``GOMP_SPINCOUNT`` says, and each of the threads sleeps some five times a layer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            future.set_exception(error)

    thread = threading.Thread(target=run, name="passing", daemon=True)  # an interrupt ends it too
    thread.start()
    result = future.result()
    thread.join()
    return result


def cores_of_the_creator() -> set[int]:
    """The cores of the process that made this one with `multiprocessing`; else, its own."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    creator = multiprocessing.parent_process()
    if creator is not None and creator.pid is not None:
        with suppress(OSError):  # it has ended
            return os.sched_getaffinity(creator.pid)
    return os.sched_getaffinity(0)


@contextmanager
def threads_on_the_cores_of_the_creator() -> Iterator[None]:
    """Threads that start inside may run on the cores of the process that made this one.

    A thread begins on the cores of the thread that starts it. OpenMP binds the thread that computes
    to one core, where every thread of its own would hold up the whole team. Without effect in a
    process that `multiprocessing` did not make.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound | cores_of_the_creator())
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """The cores that each control group allows, if it has a limit."""
    for folder, version in group_folders("cpu", proc, cgroup):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            cores = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
            continue
        if cores > 0:  # version 1 has -1 for no limit
            yield cores
