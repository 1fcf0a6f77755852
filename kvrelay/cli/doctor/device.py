"""``kvrelay doctor --device``: what a device computes, as lines or as JSON to send."""

from __future__ import annotations

import json
from dataclasses import asdict

from kvrelay.cli.screen import paint, print_out
from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.engine.kernels import kernels
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.self_test import SelfTest, self_test

_MARKS = {True: ("+", "green"), False: ("!", "red"), None: (" ", "blue")}


def show_device(device: str, as_json: bool) -> int:
    """Print every check; 1 if one does not hold."""
    model = load_model(SHIPPED_MODEL, "bfloat16", device, attention_backend="sdpa")
    found = self_test(model)
    where = "/".join(kernels(model.device))
    if as_json:
        checks = [asdict(check) for check in found.checks]
        print_out(
            json.dumps(
                {"device": where, "way": found.way, "reasons": found.reasons, "checks": checks},
                indent=2,
            )
        )
    else:
        for line in lines(found, where):
            print_out(line)
    return 1 if found.reasons else 0


def lines(found: SelfTest, where: str) -> list[str]:
    """The checks for people, and what follows from them."""
    made = [where]
    for check in found.checks:
        mark, colour = _MARKS[check.holds]
        made.append(f"{paint(mark, colour)} {check.name:<18} {check.found}")
    return [*made, f"Best way of computing here: {found.way}."]
