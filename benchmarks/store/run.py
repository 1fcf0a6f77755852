"""``python -m benchmarks.store``: how fast each transport is, beside what it could be at best.

The store is a process of its own, and so is the sender of the bare socket. Rows take turns in many
short rounds, and each is shown at its best: other load on the machine can only slow it down.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.store import redis_rows
from benchmarks.store.baselines import MemcpyBaseline, SocketBaseline
from benchmarks.store.redis_server import find_server, version_of
from benchmarks.store.rig import GB, GET_BLOCKS, StoreRig
from benchmarks.store.rows import get_rows, lookup_seconds, put_rows
from kvrelay.config.reader import load, option
from kvrelay.process import malloc
from kvstore.client.transports.selector import TRANSPORTS

DESCRIPTION = """\
Measures on this machine, with a store of its own, how fast each transport gets and puts blocks,
against a memcpy of the same bytes and a bare socket, and how long a lookup takes. With a
redis-server our Redis client is measured too, against a bare socket that speaks its protocol."""
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
CHECKED = "memcpy, checked"
LOOKUP_NAMES = 1000
MIN_ROUNDS = 6
"""However large the blocks are."""
FEW, MANY, QUICK_MANY = 1000, 1_000_000, 20_000
RIVALS = {**dict.fromkeys(("shm get", "shm put", CHECKED), "memcpy"), **redis_rows.RIVALS}
ALONE = {"memcpy", "bare socket", *redis_rows.RIVALS.values()}
ROWS = (
    "memcpy",
    CHECKED,
    "bare socket",
    *(f"{transport} get" for transport in TRANSPORTS),
    *(f"{transport} put" for transport in TRANSPORTS),
    *redis_rows.RIVALS,
    *redis_rows.RIVALS.values(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBenchConfig:
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
class RateRow:
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
class BenchRound:
    """One row once: GB/s, and seconds of processor time a GB."""

    rate: float
    client: float
    store: float


@dataclass(frozen=True, slots=True)
class LookupTiming:
    """Median seconds of a lookup of 1,000 names, with a lease, in a store of ``blocks``."""

    blocks: int
    seconds: float


def measure(config: StoreBenchConfig) -> tuple[list[RateRow], list[LookupTiming]]:
    """Every row, and lookups among few and among many blocks."""
    rounds = min(config.rounds, 2) if config.quick else config.rounds
    total = config.bytes // 16 if config.quick else config.bytes
    rows: list[RateRow] = []
    for size in config.sizes:
        # A whole call a round at least; of large blocks in fewer rounds.
        least = 0 if config.quick else GET_BLOCKS * size
        per_round = max(total // rounds, least)
        turns = rounds if config.quick else max(total // per_round, MIN_ROUNDS)
        rows += _of_size(size, per_round, turns, config)
    many = QUICK_MANY if config.quick else MANY
    if config.rows:
        return rows, []
    return rows, [LookupTiming(n, lookup_seconds(LOOKUP_NAMES, n)) for n in (FEW, many)]


def _of_size(size: int, per_round: int, rounds: int, config: StoreBenchConfig) -> list[RateRow]:
    """A round goes through all rows before the next begins."""
    with StoreRig(size, max(config.working_set, 256 * size)) as rig:
        gets, puts = get_rows(rig), put_rows(rig)
        with (
            MemcpyBaseline(rig) as memcpy,
            MemcpyBaseline(rig, checked=True) as checked,
            SocketBaseline(rig) as bare,
            redis_rows.redis_rows(rig) as redis,
        ):
            rivals = {"memcpy": memcpy, CHECKED: checked, "bare socket": bare}
            table = {**rivals, **gets, **puts, **redis}
            wanted = {*(config.rows or table), *ALONE}
            table = {what: run for what, run in table.items() if what in wanted}
            for run in table.values():
                run(min(per_round, 32 * size))  # connections, first touch, warm caches
            done: list[dict[str, BenchRound]] = []
            for _ in range(rounds):
                rig.hold()
                done.append({what: _round(rig, run, per_round) for what, run in table.items()})
    return [_row(size, what, done) for what in table]


def _round(rig: StoreRig, run: Callable[[int], float], total: int) -> BenchRound:
    client, store = rig.processor()
    rate = run(total)
    after = rig.processor()
    return BenchRound(rate, (after[0] - client) / total * GB, (after[1] - store) / total * GB)


def _row(size: int, what: str, done: Sequence[dict[str, BenchRound]]) -> RateRow:
    rival = RIVALS.get(what, None if what in ALONE else "bare socket")
    rates = [one[what].rate for one in done]
    ratio = None if rival is None else max(rates) / max(one[rival].rate for one in done)
    cheapest = min((one[what] for one in done), key=lambda one: one.client + one.store)
    median = statistics.median(rates)
    return RateRow(size, what, max(rates), median, rival, ratio, cheapest.client, cheapest.store)


def table(rows: Sequence[RateRow], lookups: Sequence[LookupTiming]) -> str:
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


def main(argv: Sequence[str], prog: str = "kvrelay store bench") -> int:
    """Measure and print."""
    config = load(StoreBenchConfig, argv, prog, DESCRIPTION)
    malloc.keep_large_buffers()  # as every worker does
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
