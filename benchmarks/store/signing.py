"""What the tag of a block costs: ``python -m benchmarks.store.signing``.

Puts and gets with and without a key alternate on new stores. The ratios of speed are of their
medians. Processor time (client and store, ms a GB) is that of the cheapest round: what else the
machine does changes it least.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.store.rig import GB, Run, StoreRig
from benchmarks.store.rows import get_rows, put_rows
from kvrelay.block.mac import BlockKey

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
WORKING_SET = 256 << 20
MOVED = 256 << 20
ROUNDS = 5
KEY = BlockKey(b"k" * 32)


@dataclass(frozen=True, slots=True)
class SigningRound:
    """GB/s, and milliseconds of processor time a GB."""

    rate: float
    milliseconds: float


def measured(rig: StoreRig, run: Run) -> SigningRound:
    """One round of a row."""
    before = sum(rig.processor())
    rate = run(MOVED)
    return SigningRound(rate, (sum(rig.processor()) - before) / MOVED * GB * 1000)


def main() -> None:
    for title, size in SIZES.items():
        rounds: defaultdict[tuple[str, bool], list[SigningRound]] = defaultdict(list)
        for _ in range(ROUNDS):
            for key in (None, KEY):
                with StoreRig(size, WORKING_SET, key) as rig:
                    for name, run in (get_rows(rig) | put_rows(rig)).items():
                        rounds[name, key is not None].append(measured(rig, run))
        for name in sorted({name for name, _ in rounds}):
            both = [rounds[name, keyed] for keyed in (False, True)]
            plain, signed = (statistics.median(one.rate for one in found) for found in both)
            costs = [min(one.milliseconds for one in found) for found in both]
            figures = f"{plain:5.2f} GB/s, signed {signed:5.2f}: {signed / plain:.2f}"
            spent = f"processor {costs[0]:4.0f} ms a GB, signed {costs[1]:4.0f}"
            print(f"{title:>7} {name:12} {figures}; {spent}", flush=True)


if __name__ == "__main__":
    main()
