"""The fork server: its processes, and its behaviour when it is slow or dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvrelay.cluster import spawn
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.process import ProcessSpec, SupervisedProcess
from tests.cluster.processes import alive, until

pytestmark = pytest.mark.cluster
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A fork server for this test alone, and the list of what it imports."""
    made: list[str] = []
    monkeypatch.setattr(spawn, "PRELOADED", made)
    monkeypatch.setattr(spawn, "server", spawn.ForkServerClient())
    yield made
    spawn.server.end()


def status(module: str, *args: str) -> int:
    running = spawn.start_forked(module, args, ENVIRON)
    assert running.wait_started()
    with running.output as stream:
        stream.read()
    return running.wait(lambda: None)


def test_a_status_is_that_of_the_module(preloaded: list[str]) -> None:
    assert status("tests.cluster.fake_service", "0", "fails") == 3
    assert status("this") == 0


def test_the_garbage_collector_leaves_out_what_was_imported(preloaded: list[str]) -> None:
    """Its pages stay shared, and the first collection does not take a fifth of a second."""
    assert status("tests.cluster.collector") == 3


def test_workers_have_their_engine_imported() -> None:
    """Else each of them imports torch and transformers, which takes two seconds."""
    program = (
        "import importlib, sys\n"
        "from kvrelay.cluster.spawn import PRELOADED\n"
        "for module in PRELOADED:\n"
        "    importlib.import_module(module)\n"
        "before = set(sys.modules)\n"
        "from kvrelay.worker.engines.native import open_native\n"
        "print('torch' in before, sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRON, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True []"


def test_what_cannot_be_imported_is_said_by_who_needs_it(preloaded: list[str]) -> None:
    preloaded.append("no_such_module")
    assert status("no_such_module") == 1


def test_who_is_not_born_yet_is_not_waited_for(preloaded: list[str]) -> None:
    """A start is cancelled while the fork server imports; this one's imports never end."""
    preloaded.append("tests.cluster.never_imported")
    spec = ProcessSpec(
        role="decode",
        index=0,
        module="this",
        args=(),
        host="",
        port=0,
        environ=ENVIRON,
        forked=True,
    )
    process = SupervisedProcess(spec, lambda spec, line: None, lambda spec, what: None, None)
    process.start()
    until(lambda: process.starts == 1, "started")
    assert process.pid is None
    process.end()
    assert process.join(20)
    assert process.pid is None


def test_a_fork_server_that_was_killed_is_started_again(preloaded: list[str]) -> None:
    running = spawn.start_forked("tests.cluster.fake_service", ("0", "silent"), ENVIRON)
    assert running.wait_started()
    pid = running.pid
    assert pid is not None
    spawn.server.end()
    assert alive(pid)
    assert status("this") == 0
    os.kill(pid, signal.SIGKILL)
    assert running.wait(lambda: None) == spawn.UNKNOWN_STATUS
    running.output.close()


def test_nothing_stays_open(preloaded: list[str]) -> None:
    assert status("this") == 0
    gc.collect()  # what other tests left open
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        assert status("this") == 0
    assert len(os.listdir("/dev/fd")) == before
