"""Weights are views of their files until they are moved: host memory holds no copy of a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.models import tiny_model

PROGRAM = """
import sys
from pathlib import Path
import torch
from kvrelay.engine.model import pretrained

def own_memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) << 10

directory, small = map(Path, sys.argv[1:])
pretrained.read_weights(small, "bfloat16", torch.device("cpu"))  # what libraries take at first
for dtype in ("bfloat16", "float32"):
    before = own_memory()
    model = pretrained.read_weights(directory, dtype, torch.device("cpu"))
    print(sum(parameter.nbytes for parameter in model.parameters()), own_memory() - before)
"""


def test_weights_take_no_memory_of_the_host_before_they_are_moved(tmp_path: Path) -> None:
    """In the dtype of the files. Weights that are converted show that the measure can see them."""
    small = tiny_model("llama", tmp_path / "small", torch.bfloat16)
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2}
    large = tiny_model("llama", tmp_path / "large", torch.bfloat16, **sizes)
    command = [sys.executable, "-c", PROGRAM, str(large), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, taken, converted, more = map(int, done.stdout.split()[-4:])
    assert size > 30 << 20
    assert taken < size // 2
    assert converted == 2 * size
    assert more > converted // 2
