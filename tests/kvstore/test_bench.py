"""The speed table is made and says what it must; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.store.rig import StoreRig
from benchmarks.store.run import ROWS, StoreBenchConfig, main
from tests.cluster.processes import alive, until


def test_a_quick_run_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--bytes=16MiB", "--working-set=2MiB", "--sizes=65536", "--quick", "--json"]
    assert main(flags) == 0
    found = json.loads(capsys.readouterr().out)
    transports = [
        f"{transport} {what}" for what in ("get", "put") for transport in ("shm", "socket", "grpc")
    ]
    redis = ["bare redis get", "redis get", "bare redis put", "redis put"]
    alone = ["memcpy", "memcpy, checked", "bare socket"]
    assert [row["what"] for row in found["rows"]] == [*alone, *transports, *redis]
    assert {row["what"] for row in found["rows"]} == set(ROWS)
    assert all(row["client"] > 0 for row in found["rows"])
    assert all(row["store"] > 0 for row in found["rows"] if row["what"] in transports)
    assert all(row["rate"] >= row["median"] > 0 for row in found["rows"])
    assert "v=" in found["redis"]
    rivals = {row["what"]: row["rival"] for row in found["rows"]}
    assert {rivals[transport] for transport in transports} == {"memcpy", "bare socket"}
    assert [rivals[row] for row in redis] == [None, redis[0], None, redis[2]]
    assert [lookup["blocks"] for lookup in found["lookups"]] == [1000, 20_000]


def test_a_full_run_moves_a_gibibyte_for_each_row() -> None:
    config = StoreBenchConfig()
    assert config.bytes >= 1 << 30
    assert set(config.sizes) == {64 << 10, 256 << 10, 1 << 20, 4 << 20}


def test_a_store_that_could_not_be_filled_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(rig: StoreRig) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreRig, "_fill", fill)
    rig = StoreRig(1 << 16, 1 << 20)
    with pytest.raises(KeyboardInterrupt), rig:
        pass
    assert rig._process.poll() is not None


def test_a_size_that_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1", "16GiB"):
        with pytest.raises(SystemExit):
            main([f"--sizes={wrong}", "--quick"])
        assert "sizes: " in capsys.readouterr().err


def test_nothing_that_was_started_outlives_a_killed_process() -> None:
    script = (
        "import sys; from benchmarks.store.child import start_child\n"
        "print(start_child(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    until(lambda: not alive(child), "the child has ended", 30.0)
