"""``kvrelay up`` of the wheel, started in a folder with modules named as parts of ours."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.random_model import make_model
from kvrelay import Client
from tests.cluster.processes import until
from tests.install.conftest import Installed

pytestmark = pytest.mark.cluster
START_SECONDS = 120.0


def test_up_serves(
    with_all: Installed, foreign: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")
    endpoints, log = foreign / "up.json", foreign / "log"
    flags = [
        "--model",
        str(model),
        "--port",
        "0",
        "--http-port",
        "0",
        "--endpoints",
        str(endpoints),
    ]
    with log.open("wb") as out:
        up = subprocess.Popen(
            [with_all.kvrelay, "up", *flags], cwd=foreign, stdout=out, stderr=subprocess.STDOUT
        )

    def serves() -> bool:
        assert up.poll() is None, log.read_text()
        return endpoints.exists()

    try:
        until(serves, log.read_text, START_SECONDS)
        with Client(json.loads(endpoints.read_text())["router"]) as client:
            answer = client.complete(timeout=60, token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("how", ["command", "module"])
def test_a_command_imports_nothing_of_the_folder(
    with_all: Installed, foreign: Path, how: str
) -> None:
    """``python -m kvrelay`` too, although Python puts the folder first on the path for it."""
    start = [with_all.kvrelay] if how == "command" else [with_all.python, "-m", "kvrelay"]
    done = with_all.run(*start, "up", "--help", cwd=foreign)
    assert done.returncode == 0, done.stderr
    assert "--prefill" in done.stdout
