"""``kvrelay up`` as a user runs it: a real cluster of a tiny model, signals, no orphans."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.random_model import make_model
from kvrelay.cli import up as command
from kvrelay.cluster.layout import ROOT
from tests.cluster.processes import alive, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
START_SECONDS = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")


class Up:
    """A running ``kvrelay up`` and the content of its endpoints file."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.model = model
        self.file = folder / "up.json"
        self.log = folder / "log"
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvrelay", "up", "--model", str(model)),
                    *("--port", "0", "--http-port", "0", "--endpoints", str(self.file), *flags),
                ],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        until(self._is_up, self.told("up"), START_SECONDS)

    def told(self, what: str) -> Callable[[], str]:
        """For a failure: the awaited text, and the output meanwhile."""
        return lambda: f"{what}; it said:\n{self.log.read_text()}"

    def _is_up(self) -> bool:
        assert self.popen.poll() is None, self.log.read_text()
        return self.file.exists()

    def pids(self) -> dict[str, int]:
        content = json.loads(self.file.read_text())
        return {f"{one['role']}-{one['index']}": one["pid"] for one in content["processes"]}


@pytest.fixture
def up(model: Path, tmp_path: Path) -> Iterator[Up]:
    made = Up(model, tmp_path)
    try:
        yield made
    finally:
        made.popen.send_signal(signal.SIGTERM)
        made.popen.wait(30)


def gone(pids: dict[str, int]) -> bool:
    return not any(map(alive, pids.values()))


def test_it_serves_restarts_and_stops(up: Up) -> None:
    up.wait()
    before = up.pids()
    assert set(before) == {"store-0", "prefill-0", "decode-0", "router-0"}
    text = up.log.read_text()
    assert "namespace" in text
    assert "Serving on 127.0.0.1:" in text

    http = json.loads(up.file.read_text())["http"]
    assert f"OpenAI API at {http}/v1; try:" in text
    assert f"curl {http}/v1/completions" in text
    with urllib.request.urlopen(f"{http}/v1/models", timeout=20) as page:
        assert json.load(page)["data"][0]["id"] == up.model.name

    os.kill(before["store-0"], signal.SIGKILL)
    again = up.told("the store started again")
    until(lambda: up.pids()["store-0"] not in (None, before["store-0"]), again)

    after = up.pids()
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(30) == 0, up.log.read_text()
    assert gone(after), up.log.read_text()
    assert not up.file.exists()


def test_a_process_that_keeps_dying_is_shown_and_decides_the_status(up: Up) -> None:
    up.wait()
    for death in range(1, 4):
        before = up.pids()["store-0"]
        os.kill(before, signal.SIGKILL)
        again = up.told(f"the store started again after death {death}")
        until(lambda: up.pids()["store-0"] not in (None, before), again)  # noqa: B023
    how = "was killed by SIGKILL, 3 times in a row"
    doctor = kvrelay("doctor", "--endpoints", str(up.file))
    assert doctor.returncode == 1, doctor.stdout
    assert f"! store          {how}" in doctor.stdout
    assert how in kvrelay("top", "--once", "--endpoints", str(up.file)).stdout
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(30) == 1, up.log.read_text()
    assert f"store {how}" in up.log.read_text()


def kvrelay(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvrelay", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for one of its threads")
def test_a_signal_that_another_thread_gets_stops_it(up: Up) -> None:
    """This happened on a busy machine: the main thread was never woken."""
    up.wait()
    pids = up.pids()
    threads = {int(name) for name in os.listdir(f"/proc/{up.popen.pid}/task")} - {up.popen.pid}
    ctypes.CDLL(None).tgkill(up.popen.pid, min(threads), signal.SIGINT)
    assert up.popen.wait(30) == 0, up.log.read_text()
    assert gone(pids), up.log.read_text()


def test_killing_it_leaves_nothing(up: Up) -> None:
    up.wait()
    pids = up.pids()
    os.kill(pids["decode-0"], signal.SIGSTOP)
    up.popen.kill()
    up.popen.wait(10)
    until(lambda: gone(pids), up.told("every process gone"))


def test_a_second_signal_does_not_wait(up: Up) -> None:
    up.wait()
    pids = up.pids()
    os.kill(pids["decode-0"], signal.SIGSTOP)
    up.popen.send_signal(signal.SIGINT)
    until(lambda: "Stopping" in up.log.read_text(), "stopping")
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(5) in (0, 128 + signal.SIGINT)
    until(lambda: gone(pids), up.told("every process gone"))


def refused(model: Path, folder: Path, *flags: str, status: int = 1) -> str:
    """What ``up`` says of a model that it refuses before it starts anything."""
    up = Up(model, folder, *flags)
    assert up.popen.wait(START_SECONDS) == status
    text = up.log.read_text()
    assert "Traceback" not in text
    assert "Starting" not in text
    assert "ready" not in text
    return text


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    text = refused(tmp_path / "nothing", tmp_path)
    assert text.count("\n") == 1
    assert text.startswith(f"kvrelay up: {tmp_path / 'nothing'}: ")


def test_a_model_that_cannot_be_served_is_refused_once_before_the_start(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_encoder_decoder": True}))
    text = refused(tmp_path / "other", tmp_path)
    assert text.count("encoder-decoder") == 1
    line = text.splitlines()[-1]
    assert line.startswith(f"kvrelay up: {tmp_path / 'other'}: an encoder-decoder model")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused_once_before_the_start(
    model: Path, tmp_path: Path
) -> None:
    text = refused(model, tmp_path, "--device", "cuda")
    assert text.count("no CUDA device is available") == 1


def test_a_length_beyond_the_model_is_refused_once_before_the_start(tmp_path: Path) -> None:
    text = refused(Path("recall"), tmp_path, "--max-model-len", "100000")
    assert text.count("max_model_len 100000 exceeds the model's own limit of 4096") == 1


def test_a_collector_that_is_no_url_is_refused_before_the_start(
    model: Path, tmp_path: Path
) -> None:
    text = refused(model, tmp_path, "--otlp-endpoint", "127.0.0.1:4317", status=2)
    assert "otlp_endpoint: must be like http://HOST:4317" in text


def test_a_taken_http_port_is_named_with_the_way_out(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        up = Up(model, tmp_path, "--http-port", str(port))
        assert up.popen.wait(START_SECONDS) != 0
    (line,) = [line for line in up.log.read_text().splitlines() if "taken" in line]
    assert f"http_port: {port} on 127.0.0.1 is taken" in line
    assert "--http-port 0" in line
    assert "--no-http" in line


def test_a_store_that_does_not_answer_is_told(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ("--store", "kvrelay://127.0.0.1:1", "--http-port", str(taken.getsockname()[1]))
        up = Up(model, tmp_path, *flags)
        assert up.popen.wait(START_SECONDS) != 0
    told = "store: nothing listens at 127.0.0.1:1; until it answers, prompts are computed"
    assert f"kvrelay up: {told}" in up.log.read_text()


def test_a_port_of_an_api_that_is_off_is_refused(model: Path, tmp_path: Path) -> None:
    assert "http_port: 0: --no-http" in refused(model, tmp_path, "--no-http", status=2)


def test_ctrl_c_ends_the_check_of_the_model(model: Path, tmp_path: Path) -> None:
    up = Up(model, tmp_path)
    until(lambda: "Checking" in up.log.read_text(), up.told("checking"))
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(30) == 130, up.log.read_text()
    assert "Starting" not in up.log.read_text()


def test_nothing_starts_between_the_end_of_the_check_and_that_of_the_command(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = command.Up(command.UpConfig(model=str(model), quiet=True))
    checking, ended = threading.Event(), threading.Event()

    class Check:
        def run(self, timeout: float) -> None:
            checking.set()
            assert ended.wait(timeout)

        def stop(self) -> None:
            ended.set()
            main.join(5)  # the command has this long to make something of it

    monkeypatch.setattr(run, "_model_check", Check())
    main = threading.Thread(target=run.serve)
    main.start()
    assert checking.wait(30)
    run.on_signal(signal.SIGINT)
    main.join(60)
    assert not main.is_alive()
    assert "Starting" not in capfd.readouterr().err


def test_a_healthy_start_reports_no_failed_connection(up: Up) -> None:
    up.wait()
    text = up.log.read_text()
    assert "failed to connect" not in text.lower()
    assert "nothing listens" not in text


def test_json_logs_have_its_own_lines_too(model: Path, tmp_path: Path) -> None:
    up = Up(model, tmp_path, "--log-format", "json")
    try:
        up.wait()
        before = up.pids()
        os.kill(before["decode-0"], signal.SIGKILL)
        until(lambda: up.pids()["decode-0"] != before["decode-0"], up.told("restarted"), 60)
    finally:
        up.popen.send_signal(signal.SIGTERM)
        up.popen.wait(30)
    lines = up.log.read_text().splitlines()
    own = [json.loads(line) for line in lines if line.startswith("{") and '"service": "up"' in line]
    said = [line["message"] for line in own]
    assert [one for one in said if one.startswith("decode-0 was killed by SIGKILL; restarting")]
    assert "Stopping" in said
    shown = "\n".join(line for line in lines if not line.startswith("{"))
    assert "Serving on" in shown  # standard output is for people
    assert not [word for word in ("Starting", "ready after", "restarting") if word in shown]
