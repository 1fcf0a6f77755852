"""``kvrelay doctor --device``: what a device computes, as lines or as JSON to send."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvrelay.cli.doctor.machine import version_of
from kvrelay.cli.screen import paint, print_out
from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.engine.kernels import kernels
from kvrelay.errors import Unservable
from kvrelay.process.gpus import show_one

if TYPE_CHECKING:
    from kvrelay.engine.self_test import SelfTest

_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("kvrelay", "torch", "triton", "flash_attn")
_MARKS = {True: ("+", "green"), False: ("!", "red"), None: (" ", "blue")}


def show_device(device: str, as_json: bool) -> int:
    """Print every check; 1 if one does not hold, or the device cannot be used."""
    try:
        shown = show_one(device)
        from kvrelay.engine.model.loading import load_model  # imports transformers
        from kvrelay.engine.self_test import self_test

        model = load_model(SHIPPED_MODEL, "bfloat16", shown, attention_backend="sdpa")
    except Unservable as error:
        if not as_json:
            raise
        print_out(json.dumps({"device": device, "error": str(error), **machine()}, indent=2))
        return 1
    found = self_test(model)
    where = "/".join(kernels(model.device))
    if as_json:
        report = {
            "device": where,
            "way": found.way,
            "reasons": found.reasons,
            "checks": [asdict(check) for check in found.checks],
            **machine(),
        }
        print_out(json.dumps(report, indent=2))
    else:
        for line in lines(found, where):
            print_out(line)
    return 1 if found.reasons else 0


def machine() -> dict[str, object]:
    """Versions of what computes, and each GPU's memory in bytes; ``None`` for what is not here."""
    return {
        "versions": {name: version_of(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "driver": _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else None,
        "memory": [
            torch.cuda.get_device_properties(number).total_memory
            for number in range(torch.cuda.device_count())
        ],
    }


def lines(found: SelfTest, where: str) -> list[str]:
    """The checks for people, and what follows from them."""
    made = [where]
    for check in found.checks:
        mark, colour = _MARKS[check.holds]
        made.append(f"{paint(mark, colour)} {check.name:<18} {check.found}")
    return [*made, f"Best way of computing here: {found.way}."]
