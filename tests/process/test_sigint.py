"""One Ctrl-C at any moment: the program ends without a traceback and leaves nothing behind."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.random_model import make_model
from tests.cluster.processes import until
from tests.process.terminal import Terminal

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc"),
]
LATEST = 4.0  # seconds; by then a cluster has been started, or nearly
SOON = 0.5
PRESSES = [1, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 1, 1, 1, 1, 2, 2, 2))]
_NEVER = threading.Event()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")


def interrupted(terminal: Terminal, presses: int = 1) -> int:
    """The exit status after a Ctrl-C at a random moment, and perhaps another one soon after."""
    seed = random.randrange(1 << 32)
    drawn = random.Random(seed)
    moments = [drawn.uniform(0.0, LATEST), *(drawn.uniform(0.0, SOON) for _ in range(1, presses))]
    print(f"seed {seed}: Ctrl-C after {moments} s")
    for moment in moments:
        _NEVER.wait(moment)
        terminal.ctrl_c()
    status = terminal.status()
    until(lambda: not terminal.left(), lambda: f"the end of {terminal.left()}")
    terminal.read_to_the_end()
    print(terminal.said)
    assert "Traceback" not in terminal.said
    assert "Exception ignored" not in terminal.said
    assert list(terminal.temporary.iterdir()) == []
    return status


def test_of_an_interpreter_that_ends() -> None:
    """Modules are destroyed after the interpreter has restored every handler."""
    script = (
        "import os, signal, sys\n"
        "from kvrelay.process import sigint\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):\n"
        "        kill(pid, number)\n"
        "late = Late()\n"
        "sigint.exit_on_sigint()\n"
        "sigint.exit_on_sigint()\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize("presses", PRESSES)
def test_of_a_demo_that_starts(tmp_path: Path, presses: int) -> None:
    with Terminal(tmp_path, "kvrelay", "demo") as terminal:
        terminal.wait_for_its_first_line()
        assert interrupted(terminal, presses) == 130


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["none", "decode", "prefill", "store"])
def test_of_a_demo_that_runs(tmp_path: Path, kill: str) -> None:
    """It may also have just ended, with its result."""
    with Terminal(tmp_path, "kvrelay", "demo", "--kill", kill) as terminal:
        terminal.wait_for("serves after")
        status = interrupted(terminal)
        assert status == 130 or re.search(
            r"right\.|undisturbed run|Nothing was killed", terminal.said
        )


@pytest.mark.parametrize("presses", PRESSES)
def test_of_a_cluster(tmp_path: Path, model: Path, presses: int) -> None:
    """A cluster that serves ends in order, with status 0."""
    file = tmp_path / "up.json"
    flags = ("--model", str(model), "--port", "0", "--http-port", "0", "--endpoints", str(file))
    with Terminal(tmp_path, "kvrelay", "up", *flags) as terminal:
        terminal.wait_for_its_first_line()
        status = interrupted(terminal, presses)
        assert status == 130 or (status == 0 and "Serving on" in terminal.said)
    assert not file.exists()


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", ["kvstore", "prefill_service", "decode_service", "router"])
def test_of_a_service(tmp_path: Path, model: Path, module: str, presses: int) -> None:
    flags = ["--port", "0"]
    flags += ["--budget", "16MiB"] if module == "kvstore" else ["--model", str(model)]
    flags += ["--decode", "127.0.0.1:1"] if module == "router" else []
    with Terminal(tmp_path, module, *flags) as terminal:
        terminal.wait_for_its_first_line()
        status = interrupted(terminal, presses)
        assert status == 130 or (status == 0 and " ready " in terminal.said)
