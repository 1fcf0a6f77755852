"""Runs the programs of this folder, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SECONDS = 1800  # the mistakes in attention took 400 on two busy cores

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: `make test-gpu` installs it, where it has a wheel",
)

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def interpreted(module: str, *arguments: str) -> str:
    """What a program prints with Triton's interpreter; a failure is shown with its errors."""
    return _run(module, *arguments, TRITON_INTERPRET="1")


def on_device(module: str, *arguments: str) -> str:
    """What a program prints with kernels that are compiled and run on a GPU."""
    return _run(module, *arguments, KVRELAY_TEST_DEVICE="cuda")


def plain(module: str, *arguments: str) -> str:
    """What a program prints with Triton's compiler."""
    return _run(module, *arguments)


def _run(module: str, *arguments: str, **environment: str) -> str:
    inherited = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.engine.cuda.{module}", *arguments],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout[-3000:]
    return done.stdout
