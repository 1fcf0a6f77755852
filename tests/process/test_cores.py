"""Cores from control groups as Linux writes them, threads by the size of a model, torch."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvrelay.process.cores import (
    BYTES_A_THREAD,
    MOST_THREADS,
    POSITIONS,
    SPINS,
    available_cores,
    model_threads,
    set_torch_variables,
    threads_on_the_cores_of_the_creator,
)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``/proc`` of a machine with eight cores, without control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    return folder


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(text + "\n")


def test_the_affinity_mask_alone(proc: Path, tmp_path: Path) -> None:
    assert available_cores(proc, tmp_path / "none") == 8
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert available_cores(proc, tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("inner", "outer", "cores"),
    [
        ("max 100000", "max 100000", 8),
        ("max 100000", "250000 100000", 2),
        ("300000 100000", "max 100000", 3),
        ("1600000 100000", "max 100000", 8),
        ("50000 100000", "max 100000", 1),
        ("nonsense", "max 100000", 8),
    ],
)
def test_the_tightest_quota_of_version_2_counts(
    proc: Path, tmp_path: Path, inner: str, outer: str, cores: int
) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    write(root / "pod" / "box", max=inner)
    write(root / "pod", max=outer)
    assert available_cores(proc, root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("200000", 2)])
def test_a_quota_of_version_1(proc: Path, tmp_path: Path, quota: str, cores: int) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("4:cpu,cpuacct:/box\n0::/\n")
    write(root / "cpu" / "box", cfs_quota_us=quota, cfs_period_us="100000")
    assert available_cores(proc, root) == cores


def test_a_small_model_has_one_thread() -> None:
    assert model_threads(BYTES_A_THREAD - 1, 16) == 1
    assert model_threads(0, 16) == 1


def test_a_small_model_has_more_in_long_steps() -> None:
    weights = BYTES_A_THREAD // 4
    found = [model_threads(weights, 4, positions=n * POSITIONS) for n in (1, 7, 8, 12, 1000)]
    assert found == [1, 1, 2, 3, 4]


def test_a_large_model_has_its_share_of_the_cores() -> None:
    large = 1000 * BYTES_A_THREAD
    assert [model_threads(large, 8, workers) for workers in (1, 4, 5, 8, 20)] == [8, 2, 1, 1, 1]
    assert model_threads(large, 64) == MOST_THREADS


def test_threads_grow_with_the_weights() -> None:
    assert [model_threads(n * BYTES_A_THREAD, 4) for n in (1, 2, 3, 4, 50)] == [1, 2, 3, 4, 4]


OURS = {"GOMP_SPINCOUNT": str(SPINS), "THP_MEM_ALLOC_ENABLE": "1"}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_says_about_torch_is_kept(name: str) -> None:
    users = {name: "active", "THP_MEM_ALLOC_ENABLE": "0"}
    given = dict(users)
    set_torch_variables(given)
    assert given == users
    empty: dict[str, str] = {}
    set_torch_variables(empty)
    assert empty == OURS


@pytest.mark.parametrize("service", ["prefill_service", "decode_service"])
def test_a_worker_sets_them_before_torch_is_loaded(service: str) -> None:
    """And before any module that imports torch: they are read once, when it is loaded."""
    program = (
        "import json, os, runpy, sys\n"
        "def watch(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'torch':\n"
        "        print(json.dumps(dict(os.environ)), flush=True)\n"
        "        os._exit(0)\n"
        "sys.addaudithook(watch)\n"
        f"sys.argv = ['{service}', '--model', 'none']\n"
        f"runpy.run_module('{service}', run_name='__main__')\n"
    )
    assert variables(program) == OURS


def test_the_fork_server_sets_them_before_torch_is_loaded() -> None:
    program = (
        "import json, os\n"
        "from kvrelay.cluster import forkserver\n"
        "forkserver.import_module = lambda name: ("
        "print(json.dumps(dict(os.environ)), flush=True), os._exit(0))\n"
        "forkserver.main(['0', 'torch'])\n"
    )
    assert variables(program) == OURS


def test_torch_asks_for_huge_pages() -> None:
    program = (
        "from kvrelay.process import cores\n"
        "cores.set_torch_variables()\n"
        "import torch\n"
        "def advised():\n"
        "    flags = [line for line in open('/proc/self/smaps') if line.startswith('VmFlags')]\n"
        "    return sum(' hg' in line for line in flags)\n"
        "before, tensor = advised(), torch.zeros(4 << 20, dtype=torch.uint8)\n"
        "print(advised() - before)\n"
    )
    assert printed(program) == "1"


def printed(program: str) -> str:
    """What a new process prints that has none of ``OURS`` in its environment."""
    environ = {k: v for k, v in os.environ.items() if k not in {*OURS, "OMP_WAIT_POLICY"}}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def variables(program: str) -> dict[str, str]:
    """Those of ``OURS`` in the environment that such a process prints."""
    return {name: value for name, value in json.loads(printed(program)).items() if name in OURS}


def test_no_team_stays_behind_where_a_worker_opened_its_engine() -> None:
    """A second team would have more threads than cores, and libgomp would not spin for work."""
    program = (
        "import os, time\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"  # torch's other pools start as soon as it is set
        "import torch\n"
        "from kvrelay.engine.engine import EngineOptions\n"
        "from kvrelay.rpc.security.credentials import Credentials\n"
        "from kvrelay.worker.config import WorkerConfig\n"
        "from kvrelay.worker.engines.native import open_native\n"
        "from kvrelay.cluster.config import SHIPPED_MODEL\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = threads()\n"
        "config = WorkerConfig(model=str(SHIPPED_MODEL), threads=2, num_blocks=64)\n"
        "made = open_native(config, Credentials(), lambda updates: None, EngineOptions())\n"
        "until = time.monotonic() + 10\n"
        "while threads() > before and time.monotonic() < until: time.sleep(0.01)\n"
        "print('threads', made.threads, threads() - before)\n"
    )
    assert printed(program) == "threads 2 0"


def start_a_thread(answer: Connection) -> None:
    """In a process on one core: the cores of a thread started inside, and then its own."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cores: list[set[int]] = []
    thread = threading.Thread(target=lambda: cores.append(os.sched_getaffinity(0)))
    with threads_on_the_cores_of_the_creator():
        thread.start()
    thread.join()
    answer.send((*cores, os.sched_getaffinity(0)))


def test_threads_leave_the_core_of_the_thread_that_computes() -> None:
    mine = os.sched_getaffinity(0)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=start_a_thread, args=(there,))
    child.start()
    assert here.recv() == (mine, {min(mine)})
    child.join()
