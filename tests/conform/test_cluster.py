"""A real cluster passes every check, also when its processes are killed in between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.supervisor import Cluster
from kvrelay.conform.checks import NAMES

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KILLED = ("decode", "prefill", "store")
SMALL = ("--prompts", "3", "--output", "24", "--neighbours", "6", "--flood", "65536")


def test_every_check_is_exact(tmp_path: Path) -> None:
    """The supervisor starts again what the restart command kills: a process of each kind."""
    config = ClusterConfig(
        port=0, http_port=0, decode=2, threads=1, num_blocks=256, store_budget=1 << 20
    )
    path = tmp_path / "conform.json"
    with Cluster(config) as cluster:
        pids = " ".join(str(cluster.process(kind).pid) for kind in KILLED)
        assert cluster.http is not None
        command = f"set -- {pids}; shift $((KVRELAY_RESTART - 1)); kill -9 $1"
        words = [sys.executable, "-m", "kvrelay", "conform", cluster.http, *SMALL]
        words += ["--json", str(path), "--restart-command", command]
        words += ["--restarts", str(len(KILLED))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {row["name"]: row for row in json.loads(path.read_text())["checks"]}
    assert set(checks) == set(NAMES)
    for name, row in checks.items():
        kinds = {kind for kind in ("greedy", "sampled", "all") if kind in row}
        assert {row[kind]["outcome"] for kind in kinds} == {"exact"}, (name, row)
        assert all(row[kind]["logprob_gap"] == 0 for kind in kinds), (name, row)
