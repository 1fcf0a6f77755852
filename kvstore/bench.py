"""``python -m kvstore.bench``: how fast the bytes go, each way beside what it could be at best.

The store is a process of its own, and so is whoever sends to the bare socket. Rows take turns in
many short rounds, and each is shown at its best: what else the machine does can only slow it down.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from common.config import load, option
from kvstore import benchredis
from kvstore.benchredis import redis_rows
from kvstore.benchrows import Bare, Memcpy, Rig, get_rows, lookup_seconds, put_rows

DESCRIPTION = """\
Measures on this machine, with a store of its own, how fast blocks are got and put on each way,
beside a memcpy of the same bytes and a bare socket, and how long a lookup takes. Where there is a
redis-server, so is our client of it beside a bare socket that speaks its protocol."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LOOKUP_NAMES = 1000
FEW, MANY, QUICK_MANY = 1000, 1_000_000, 20_000
RIVALS = {"shm get": "memcpy", "shm put": "memcpy", **benchredis.RIVALS}
ALONE = {"memcpy", "bare socket", *benchredis.RIVALS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is measured."""

    bytes: int = option(1 << 30, "moved for each row", unit="bytes", low=1 << 20)
    rounds: int = option(16, "rounds the bytes are moved in", low=1)
    working_set: int = option(256 << 20, "bytes of different blocks", unit="bytes", low=1 << 20)
    sizes: tuple[int, ...] = option(SIZES, "bytes of a block's payload; may be repeated")
    quick: bool = option(False, "a sixteenth of the bytes in two rounds, to see that it works")
    json: bool = option(False, "print JSON instead of a table")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: best and median rate in GB/s; the best's ``ratio`` to that of ``rival``."""

    size: int
    what: str
    rate: float
    median: float
    rival: str | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Lookup:
    """Median seconds of a lookup of 1,000 names, with a lease, in a store of ``blocks``."""

    blocks: int
    seconds: float


def measure(config: BenchConfig) -> tuple[list[Row], list[Lookup]]:
    """Every row, and lookups among few and among many blocks."""
    rounds = min(config.rounds, 2) if config.quick else config.rounds
    total = config.bytes // 16 if config.quick else config.bytes
    rows: list[Row] = []
    for size in config.sizes:
        rows += _of_size(size, total // rounds, rounds, config.working_set)
    many = QUICK_MANY if config.quick else MANY
    return rows, [Lookup(n, lookup_seconds(LOOKUP_NAMES, n)) for n in (FEW, many)]


def _of_size(size: int, per_round: int, rounds: int, working_set: int) -> list[Row]:
    """A round goes through all rows before the next begins."""
    with Rig(size, max(working_set, 256 * size)) as rig:
        gets, puts = get_rows(rig), put_rows(rig)
        with Memcpy(rig) as memcpy, Bare(rig) as bare, redis_rows(rig) as redis:
            rivals: dict[str, Callable[[int], float]] = {"memcpy": memcpy, "bare socket": bare}
            table = {**rivals, **gets, **puts, **redis}
            for run in table.values():
                run(min(per_round, 32 * size))  # connections, first touch, warm caches
            rates = []
            for _ in range(rounds):
                rig.hold()
                rates.append({what: run(per_round) for what, run in table.items()})
    return [_row(size, what, rates) for what in table]


def _row(size: int, what: str, rates: Sequence[dict[str, float]]) -> Row:
    rival = RIVALS.get(what, None if what in ALONE else "bare socket")
    best = max(rate[what] for rate in rates)
    ratio = None if rival is None else best / max(rate[rival] for rate in rates)
    return Row(size, what, best, statistics.median(rate[what] for rate in rates), rival, ratio)


def table(rows: Sequence[Row], lookups: Sequence[Lookup]) -> str:
    """For people."""
    lines = [f"{'block':>8}  {'row':<14} {'GB/s':>7} {'median':>7}  {'ratio':>5}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:5.2f} of {row.rival}"
        rates = f"{row.rate:7.2f} {row.median:7.2f}"
        lines.append(f"{row.size >> 10:>5}KiB  {row.what:<14} {rates}  {ratio}".rstrip())
    for lookup in lookups:
        took = f"{lookup.seconds * 1e3:.2f} ms"
        lines.append(f"lookup of {LOOKUP_NAMES:,} names among {lookup.blocks:,} blocks: {took}")
    return "\n".join(lines)


def main(argv: Sequence[str], prog: str = "python -m kvstore.bench") -> int:
    """Measure and print."""
    config = load(BenchConfig, argv, prog, DESCRIPTION)
    rows, lookups = measure(config)
    if config.json:
        print(json.dumps({"rows": list(map(asdict, rows)), "lookups": list(map(asdict, lookups))}))
    else:
        print(table(rows, lookups))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
