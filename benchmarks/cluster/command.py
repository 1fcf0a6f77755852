"""``kvrelay bench``: the cluster measured beside plain ``transformers``, part by part."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.config import PARTS, ClusterBenchConfig, model_directory
from benchmarks.cluster.rows import BenchRow, figure, markdown, screen
from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.config.reader import load
from kvrelay.process import sigint

DESCRIPTION = """\
Measures on this machine, all in one run: (a) throughput against transformers' generate and
generate_batch, (b) the first token cold, with a local hit and with a store hit, (c) the
handoff from prefill to decode, (d) what the router adds. A ratio over 1 means that kvrelay is
ahead of the baseline."""
WIDTH = 80


def main(argv: Sequence[str]) -> int:
    config = load(ClusterBenchConfig, argv, "kvrelay bench", DESCRIPTION)
    with sigint.sigint_exits():
        # It imports torch: not before the flags are read.
        from benchmarks.cluster.run import ClusterBench

    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as made:
        bench = ClusterBench(config, model_directory(config, Path(made)))
        if not config.json:
            print_out(textwrap.fill(bench.describe(), WIDTH))
        rows = []
        for row in bench.rows():
            rows.append(row)
            print_err(f"  ({row.part}) {row.name}: {figure(row.ours)} {row.unit}")
        show(config, bench.describe(), rows)
    return 0


def show(config: ClusterBenchConfig, machine: str, rows: Sequence[BenchRow]) -> None:
    """Print the rows as JSON, as Markdown or as tables."""
    if config.json:
        print_out(
            json.dumps({"machine": machine, "rows": [row.as_json() for row in rows]}, indent=2)
        )
        return
    for part in config.parts:
        mine = [row for row in rows if row.part == part]
        print_out(f"\n{paint(f'({part}) {PARTS[part]}', 'bold')}")
        print_out(markdown(mine) if config.markdown else screen(mine))
