"""What one process of ``kvrelay load`` can drive, against a stub server that has no model.

    python -m benchmarks.load_overhead [--streams 1,16,64,256] [--seconds 5]

The stub is in a process of its own and sends a token as soon as it can, so on a machine with two
cores it is the stub that is the bottleneck, or the generator, whichever costs more: the column
`core` is the share of a core that the generator used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.stub_server import stub_process

HEAD = ("streams", "gap ms", "tokens/s", "core", "us a token", "loop delay p99 ms", "kept up")


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_overhead", description=__doc__)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--gaps", default="0,0.02", help="seconds between two tokens of a stream")
    parser.add_argument("--seconds", default="5", help="of each row")
    options = parser.parse_args(argv)
    print("| " + " | ".join(HEAD) + " |\n|" + "--:|" * len(HEAD))
    for gap in map(float, options.gaps.split(",")):
        with stub_process(gap) as url, tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "load.json"
            flags = ["--concurrency", options.streams, "--seconds", options.seconds]
            command = [sys.executable, "-m", "kvrelay", "load", url, *flags, "--json", str(path)]
            subprocess.run([*command, "--no-progress"], stdout=subprocess.DEVNULL, check=True)
            for level in json.loads(path.read_text())["levels"]:
                _print(level, gap)
    return 0


def _print(level: dict[str, object], gap: float) -> None:
    generator = level["generator"]
    rate = level["output_tokens_per_second"]
    assert isinstance(generator, dict)
    assert isinstance(rate, float)
    share = float(generator["core_share"])
    cells = (
        str(level["label"]).removesuffix(" at once"),
        f"{gap * 1e3:g}",
        f"{rate:,.0f}",
        f"{share:.0%}",
        f"{share / rate * 1e6:.1f}",
        f"{generator['loop_delay_seconds']['p99'] * 1e3:.1f}",
        "yes" if generator["kept_up"] else "no",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
