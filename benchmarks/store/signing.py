"""What the tag of a block costs: ``python -m benchmarks.store.signing``.

Puts and gets with and without a key alternate on new stores; the ratios are of their medians.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from benchmarks.store.rig import StoreRig
from benchmarks.store.rows import get_rows, put_rows
from kvrelay.block.mac import BlockKey

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
WORKING_SET = 256 << 20
MOVED = 256 << 20
ROUNDS = 5
KEY = BlockKey(b"k" * 32)


def main() -> None:
    for title, size in SIZES.items():
        speeds: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
        for _ in range(ROUNDS):
            for key in (None, KEY):
                with StoreRig(size, WORKING_SET, key) as rig:
                    for name, run in (get_rows(rig) | put_rows(rig)).items():
                        speeds[name, key is not None].append(run(MOVED))
        for name in sorted({name for name, _ in speeds}):
            plain, signed = (statistics.median(speeds[name, keyed]) for keyed in (False, True))
            figures = f"{plain:5.2f} GB/s, signed {signed:5.2f}: {signed / plain:.2f}"
            print(f"{title:>7} {name:12} {figures}", flush=True)


if __name__ == "__main__":
    main()
