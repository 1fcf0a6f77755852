"""How long a stream pauses when its decode worker dies or stops, and what is computed again.

    python -m tests.failures.recovery --times 8

Prints the figures of docs/failures.md: with default settings and with fast health checks.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.exact.oracle import Oracle
from tests.failures.cells import Cell
from tests.failures.moments import MIDDLE
from tests.failures.rig import Rig, rig
from tests.models import tiny_model

PACES = {
    "default": {},
    "fast": {"health_interval": "0.05", "health_timeout": "0.15"},
}


def measure(stand: Rig, oracle: Oracle, number: signal.Signals, times: int) -> str:
    """Strike a decode worker in the middle of a stream, so many times; one line."""
    pauses: list[float] = []
    again: list[int] = []
    beyond: list[int] = []
    while len(pauses) < times:
        cell = Cell(stand, oracle, "decode", MIDDLE, random.randrange(1 << 32))
        strike = cell.run(number)
        cell.check(strike)
        if cell.recomputed():  # else the worker struck served no stream any more
            pauses.append(max(stream.pause_after(strike.at) for stream in cell.streams))
            again += cell.recomputed()
            beyond.append(cell.beyond(strike))
    return (
        f"{number.name}: median pause {median(pauses):.3f} s, longest {max(pauses):.3f} s;"
        f" computed again: median {median(again):g}, most {max(again)} tokens,"
        f" most beyond what was not saved {max(beyond)}"
    )


def main(argv: Sequence[str]) -> int:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.failures.recovery", description=__doc__)
    parser.add_argument("--times", type=int, default=8)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", Path(folder) / "llama", eos_token_id=None)
        oracle, rows = Oracle(model), []
        for name, environ in PACES.items():
            with rig(model, environ=environ) as stand:
                rows += [
                    f"{name}: {measure(stand, oracle, number, options.times)}"
                    for number in (signal.SIGKILL, signal.SIGSTOP)
                ]
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
