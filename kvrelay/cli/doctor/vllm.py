"""Whether a vLLM is here for ``--engine vllm``, and what its workers would compute with."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from kvrelay.cli.doctor.machine import Diagnosis, State
from kvrelay.installation import import_path
from kvrelay.version import VLLM, tested_vllm

MODULE = "kvrelay.engine.vllm.serving.describe"
SECONDS = 120.0
INSTALL = "into vLLM's environment: pip install 'kvrelay[worker-vllm]'"


def check_vllm(python: str | None) -> Iterator[Diagnosis]:
    """The vLLM of an interpreter; without one that of this process, if it has any."""
    if python is None and importlib.util.find_spec("vllm") is None:
        means = "not needed; one of another environment is checked with --vllm-python PATH"
        yield Diagnosis("vllm", "absent", "not in this environment", means)
        return
    state: State = "absent" if python is None else "missing"
    try:
        done = subprocess.run(
            [python or sys.executable, "-P", "-m", MODULE],
            env={**os.environ, **import_path(os.environ)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Diagnosis("vllm", state, str(error), "choose another with --vllm-python")
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        yield Diagnosis("vllm", state, lines[-1][:200], INSTALL)
        return
    facts = json.loads(done.stdout.splitlines()[-1])
    if facts["missing"]:
        lacks = ", ".join(facts["missing"])
        yield Diagnosis("vllm", state, f"{facts['version']}, without {lacks}", INSTALL)
        return
    invariant = "" if facts["batch_invariant"] else "not "
    found = (
        f"{facts['version']} on {facts['platform']}, model runner {facts['runner']}, attention"
        f" {facts['attention']}, {invariant}batch-invariant"
    )
    tested = tested_vllm(facts["version"])
    means = "for --engine vllm" if tested else f"only {VLLM} was tested: a worker refuses others"
    yield Diagnosis("vllm", "ok" if tested else "absent", found, means)
