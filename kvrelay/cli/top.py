"""``kvrelay top``: the workers of a router, their load, and why one is not used."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvrelay.cli.router_options import RouterOptions
from kvrelay.cli.screen import coloured, paint, print_out, table
from kvrelay.client.client import Client
from kvrelay.config.reader import load, option
from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.fleet import QueueStatus, WorkerStatus

DESCRIPTION = """\
Shows every worker that a router knows: its state, its running and waiting requests, its free KV
blocks, and why it is not used. Refreshed until Ctrl-C; with --once it ends with status 1 if no
worker can decode."""
HOME = "\x1b[H\x1b[J"  # cursor to the corner, clear the screen
COLOURS = {"ready": "green", "draining": "yellow", "suspect": "yellow", "unreachable": "red"}
HEAD = ("worker", "role", "state", "legs", "run", "load", "wait", "free blocks", "pos/s", "why")
RIGHT = frozenset({3, 4, 5, 6, 7, 8})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig(RouterOptions):
    """The router, and how often to ask it."""

    interval: float = option(1.0, "seconds between two refreshes", low=0.1)
    once: bool = option(False, "print once and end")
    json: bool = option(False, "print each refresh as one line of JSON")


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. ``rate``: positions computed per second since the refresh before."""

    address: str
    role: str
    state: str
    legs: int  # sent by this router
    running: int
    loading: int
    waiting: int
    free_blocks: int
    blocks: int
    executed: int
    reason: str
    rate: float | None = None

    @classmethod
    def of(cls, status: WorkerStatus, before: Mapping[str, int], passed: float) -> WorkerRow:
        """``before``: the positions each worker had executed ``passed`` seconds ago."""
        load, earlier = status.load, before.get(status.address)
        known = earlier is not None and passed > 0 and load.executed >= earlier
        return cls(
            address=status.address,
            role=status.role or "-",
            state=status.state,
            legs=status.in_flight,
            running=load.running,
            loading=load.loading,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            blocks=status.info.num_blocks if status.info is not None else 0,
            executed=load.executed,
            reason=status.reason,
            rate=(load.executed - (earlier or 0)) / passed if known else None,
        )


def main(argv: Sequence[str]) -> int:
    config = load(TopConfig, argv, "kvrelay top", DESCRIPTION)
    address = config.address()
    before: Mapping[str, int] = {}
    looked = time.monotonic()
    with Client(address) as client:
        while True:
            try:
                fleet, now = client.fleet(), time.monotonic()
            except (Unavailable, DeadlineExceeded) as error:
                if config.once or config.json or not before:
                    raise
                print_out(paint(f"router {address}: {error}", "red"))  # it may be back soon
                time.sleep(config.interval)
                continue
            lines = [WorkerRow.of(status, before, now - looked) for status in fleet.workers]
            _show(lines, fleet.queue, address, config)
            if config.once:
                able = (line.role == "decode" and line.state == "ready" for line in lines)
                return 0 if any(able) else 1
            before, looked = {line.address: line.executed for line in lines}, now
            time.sleep(config.interval)


def _show(lines: Sequence[WorkerRow], queue: QueueStatus, address: str, config: TopConfig) -> None:
    if config.json:
        workers = [asdict(line) for line in lines]
        print_out(json.dumps({"router": address, "queue": asdict(queue), "workers": workers}))
        return
    if not config.once and coloured(sys.stdout):
        sys.stdout.write(HOME)
    print_out(screen(lines, queue, address))


def screen(lines: Sequence[WorkerRow], queue: QueueStatus, address: str) -> str:
    """The screen for people."""
    ready = sum(line.state == "ready" for line in lines)
    rows = [
        (
            line.address,
            line.role,
            line.state,
            str(line.legs),
            str(line.running),
            str(line.loading),
            str(line.waiting),
            f"{line.free_blocks}/{line.blocks}" if line.blocks else "-",
            "-" if line.rate is None else f"{line.rate:,.0f}",
            line.reason,
        )
        for line in lines
    ]
    head, *body = table(HEAD, rows, RIGHT).splitlines()
    painted = [
        text.replace(f" {line.state} ", f" {paint(line.state, COLOURS.get(line.state, 'dim'))} ", 1)
        for text, line in zip(body, lines, strict=True)
    ]
    title = f"router {address}: {ready} of {len(lines)} workers ready"
    rate = f", drains {queue.tokens_per_second:,.0f}/s" if queue.tokens_per_second else ""
    waits = (
        f"{queue.running} of {queue.slots} requests running, {queue.waiting} waiting"
        f" ({queue.waiting_tokens:,} tokens{rate}), {queue.refused} refused so far"
    )
    return "\n".join([paint(title, "bold"), waits, "", head, *painted, ""])
