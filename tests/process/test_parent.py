"""A process that ends with its parent, also if that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.processes import alive, until

CHILD = """
import sys, time
from kvrelay.process.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
print("bound", flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys
parent = sys.argv[1] if len(sys.argv) > 1 else str(os.getpid())
command = [sys.executable, "-c", {CHILD!r}, parent]
started = subprocess.Popen(command, stdout=subprocess.PIPE)
print(started.pid, flush=True)
print(started.stdout.readline().decode().strip(), flush=True)
started.wait()
"""
CREATOR = """
import multiprocessing, sys, threading, time
from kvrelay.process.parent import end_with_creator

def child():
    end_with_creator()
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    end_with_creator()  # no process made this one
    made = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    thread = threading.Thread(target=made.start)
    thread.start()
    thread.join()
    time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"bound\n"
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: not alive(child), "the child has ended")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, "1"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"\n", "it never came to say that it is bound"
        parent.wait(20.0)
    until(lambda: not alive(child), "the child has ended")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_made_process_ends_with_its_creator_and_not_with_the_thread(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "creator.py"
    script.write_text(CREATOR)
    command = [sys.executable, str(script), method]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as creator:
        assert creator.stdout is not None
        child = int(creator.stdout.readline())
        assert alive(child), "the thread that started it has ended"
        os.kill(creator.pid, signal.SIGKILL)
    until(lambda: not alive(child), "the child has ended")
