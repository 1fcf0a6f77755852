"""``python -m kvstore.bench``: how fast the bytes go, each way beside what it could be at best.

The store is a process of its own, and so is whoever sends to the bare socket. Rows take turns in
many short rounds, and each is shown at its best: what else the machine does can only slow it down.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from common import arenas
from common.config import load, option
from kvstore.bench import redis_rows
from kvstore.bench.redisserver import find_server, version_of
from kvstore.bench.rig import GB, GET_BLOCKS, Rig
from kvstore.bench.rivals import Bare, Memcpy
from kvstore.bench.rows import get_rows, lookup_seconds, put_rows
from kvstore.ways.choice import ORDER

DESCRIPTION = """\
Measures on this machine, with a store of its own, how fast blocks are got and put on each way,
beside a memcpy of the same bytes and a bare socket, and how long a lookup takes. Where there is a
redis-server, so is our client of it beside a bare socket that speaks its protocol."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
CHECKED = "memcpy, checked"
LOOKUP_NAMES = 1000
LEAST = 6
"""Rounds, however large the blocks are."""
FEW, MANY, QUICK_MANY = 1000, 1_000_000, 20_000
RIVALS = {**dict.fromkeys(("shm get", "shm put", CHECKED), "memcpy"), **redis_rows.RIVALS}
ALONE = {"memcpy", "bare socket", *redis_rows.RIVALS.values()}
ROWS = (
    "memcpy",
    CHECKED,
    "bare socket",
    *(f"{way} get" for way in ORDER),
    *(f"{way} put" for way in ORDER),
    *redis_rows.RIVALS,
    *redis_rows.RIVALS.values(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is measured."""

    bytes: int = option(1 << 30, "moved for each row", unit="bytes", low=1 << 20)
    rounds: int = option(16, "rounds the bytes are moved in", low=1)
    working_set: int = option(256 << 20, "bytes of different blocks", unit="bytes", low=1 << 20)
    sizes: tuple[int, ...] = option(
        SIZES,
        "bytes of a block's payload; may be repeated",
        unit="bytes",
        low=1 << 10,
        high=64 << 20,
    )
    quick: bool = option(False, "a sixteenth of the bytes in two rounds, to see that it works")
    rows: tuple[str, ...] = option((), "such as 'shm get'", choices=ROWS, metavar="ROW")
    json: bool = option(False, "print JSON instead of a table")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: best and median rate in GB/s; the best's ``ratio`` to that of ``rival``.

    ``client`` and ``store`` are the seconds of processor time the two processes took for a GB, in
    the cheapest round: what else the machine does hardly changes them.
    """

    size: int
    what: str
    rate: float
    median: float
    rival: str | None
    ratio: float | None
    client: float
    store: float


@dataclass(frozen=True, slots=True)
class Round:
    """One row once: GB/s, and seconds of processor time a GB."""

    rate: float
    client: float
    store: float


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
        # A whole call a round at least; of large blocks in fewer rounds.
        least = 0 if config.quick else GET_BLOCKS * size
        per_round = max(total // rounds, least)
        turns = rounds if config.quick else max(total // per_round, LEAST)
        rows += _of_size(size, per_round, turns, config)
    many = QUICK_MANY if config.quick else MANY
    if config.rows:
        return rows, []
    return rows, [Lookup(n, lookup_seconds(LOOKUP_NAMES, n)) for n in (FEW, many)]


def _of_size(size: int, per_round: int, rounds: int, config: BenchConfig) -> list[Row]:
    """A round goes through all rows before the next begins."""
    with Rig(size, max(config.working_set, 256 * size)) as rig:
        gets, puts = get_rows(rig), put_rows(rig)
        with (
            Memcpy(rig) as memcpy,
            Memcpy(rig, checked=True) as checked,
            Bare(rig) as bare,
            redis_rows.redis_rows(rig) as redis,
        ):
            rivals = {"memcpy": memcpy, CHECKED: checked, "bare socket": bare}
            table = {**rivals, **gets, **puts, **redis}
            wanted = {*(config.rows or table), *ALONE}
            table = {what: run for what, run in table.items() if what in wanted}
            for run in table.values():
                run(min(per_round, 32 * size))  # connections, first touch, warm caches
            done: list[dict[str, Round]] = []
            for _ in range(rounds):
                rig.hold()
                done.append({what: _round(rig, run, per_round) for what, run in table.items()})
    return [_row(size, what, done) for what in table]


def _round(rig: Rig, run: Callable[[int], float], total: int) -> Round:
    client, store = rig.processor()
    rate = run(total)
    after = rig.processor()
    return Round(rate, (after[0] - client) / total * GB, (after[1] - store) / total * GB)


def _row(size: int, what: str, done: Sequence[dict[str, Round]]) -> Row:
    rival = RIVALS.get(what, None if what in ALONE else "bare socket")
    rates = [one[what].rate for one in done]
    ratio = None if rival is None else max(rates) / max(one[rival].rate for one in done)
    cheapest = min((one[what] for one in done), key=lambda one: one.client + one.store)
    median = statistics.median(rates)
    return Row(size, what, max(rates), median, rival, ratio, cheapest.client, cheapest.store)


def table(rows: Sequence[Row], lookups: Sequence[Lookup]) -> str:
    """For people."""
    head = f"{'block':>8}  {'row':<15} {'GB/s':>7} {'median':>7} {'client':>7} {'store':>7}"
    lines = [f"{head}  ratio   (client, store: ms of processor for a GB)"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:5.2f} of {row.rival}"
        rates = f"{row.rate:7.2f} {row.median:7.2f}"
        times = f"{row.client * 1e3:7.0f} {row.store * 1e3:7.0f}"
        lines.append(f"{row.size >> 10:>5}KiB  {row.what:<15} {rates} {times}  {ratio}".rstrip())
    for lookup in lookups:
        took = f"{lookup.seconds * 1e3:.2f} ms"
        lines.append(f"lookup of {LOOKUP_NAMES:,} names among {lookup.blocks:,} blocks: {took}")
    return "\n".join(lines)


def main(argv: Sequence[str], prog: str = "python -m kvstore.bench") -> int:
    """Measure and print."""
    config = load(BenchConfig, argv, prog, DESCRIPTION)
    arenas.keep_buffers()  # as every worker does
    rows, lookups = measure(config)
    found = find_server()
    redis = None if found is None else version_of(found)
    if config.json:
        listed = {"rows": list(map(asdict, rows)), "lookups": list(map(asdict, lookups))}
        print(json.dumps({**listed, "redis": redis}))
    else:
        print(table(rows, lookups))
        print(f"Redis: {redis or 'no redis-server was found, so there are no rows of it'}")
    return 0
