"""``kvrelay top``: a router's workers, their load, why one is not used, and what clients get."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.cli.router_options import RouterOptions, router_client
from kvrelay.cli.screen import coloured, paint, print_out, table
from kvrelay.cluster.endpoints import processes_of
from kvrelay.config.reader import load, option
from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.fleet import FleetStatus, RouterTotals, WorkerStatus

DESCRIPTION = """\
Shows what a router's clients get (tokens a second, cached prompt tokens, time to the first token),
and each of its workers: state, requests, free KV blocks, and why it is not used. Refreshed until
Ctrl-C; a rate is that since the refresh before, at first that since the router's start. With --once
it prints once, and ends with status 1 if no worker can decode."""
HOME = "\x1b[H\x1b[J"  # cursor to the corner, clear the screen
COLOURS = {"ready": "green", "draining": "yellow", "suspect": "yellow", "unreachable": "red"}
HEAD = ("worker", "role", "state", "legs", "run", "load", "wait", "free", "pos/s")
RIGHT = frozenset(range(3, 9))
WIDTH = 80
LEGEND = """\
legs: sent by this router and not ended. run, load, wait: requests that compute, that load KV, that
wait. free: share of the KV blocks that no request holds. pos/s: positions computed a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig(RouterOptions):
    """The router, and how often to ask it."""

    interval: float = option(1.0, "seconds between two refreshes", low=0.1)
    once: bool = option(False, "print once and end")
    json: bool = option(False, "print each refresh as one line of JSON")


@dataclass(frozen=True, slots=True)
class FleetSample:
    """A router's answer and when it came, in seconds of ``time.monotonic``."""

    fleet: FleetStatus
    at: float


@dataclass(frozen=True, slots=True)
class ServedRates:
    """What clients got between two samples; ``None`` where nothing was measured."""

    tokens_per_second: float | None
    hit_rate: float | None  # of the prompt tokens of complete answers
    first_token_seconds: float | None  # mean

    @classmethod
    def between(cls, before: RouterTotals | None, now: RouterTotals, seconds: float) -> ServedRates:
        """Since the router's start without a sample ``before``, or if the router restarted."""
        old = before if before is not None and not _restarted(before, now) else None
        prompt = now.prompt_tokens - (old.prompt_tokens if old else 0)
        cached = now.cached_prompt_tokens - (old.cached_prompt_tokens if old else 0)
        count = now.first_tokens - (old.first_tokens if old else 0)
        waited = now.first_token_seconds - (old.first_token_seconds if old else 0.0)
        tokens = None if old is None else now.generation_tokens - old.generation_tokens
        return cls(
            tokens_per_second=None if tokens is None or seconds <= 0 else tokens / seconds,
            hit_rate=cached / prompt if prompt else None,
            first_token_seconds=waited / count if count else None,
        )

    def __str__(self) -> str:
        tokens, hits, first = self.tokens_per_second, self.hit_rate, self.first_token_seconds
        parts = (
            "-" if tokens is None else f"{tokens:,.0f}",
            "-" if hits is None else f"{hits:.0%}",
            "-" if first is None else f"{first * 1e3:,.0f} ms",
        )
        return "{} tokens/s to clients, {} of prompt tokens cached, first token {}".format(*parts)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. ``rate``: positions computed per second since the sample before."""

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
    numeric_profile: str  # as measured at its start
    numerics: str  # the profile that its streams keep to; empty with --numerics loose
    rate: float | None = None

    @classmethod
    def of(cls, status: WorkerStatus, before: int | None, seconds: float) -> WorkerRow:
        """``before``: the positions that the worker had executed ``seconds`` ago."""
        load = status.load
        known = before is not None and seconds > 0 and load.executed >= before
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
            numeric_profile=status.info.numeric_profile if status.info is not None else "",
            numerics=status.info.namespace.numerics if status.info is not None else "",
            rate=(load.executed - (before or 0)) / seconds if known else None,
        )

    def cells(self, room: int) -> tuple[str, ...]:
        """The row of the table; a longer address keeps its last ``room`` characters."""
        address = self.address
        return (
            address if len(address) <= room else f"..{address[2 - room :]}",
            self.role,
            self.state,
            str(self.legs),
            str(self.running),
            str(self.loading),
            str(self.waiting),
            f"{self.free_blocks / self.blocks:.0%}" if self.blocks else "-",
            "-" if self.rate is None else f"{self.rate:,.0f}",
        )


def main(argv: Sequence[str]) -> int:
    config = load(TopConfig, argv, "kvrelay top", DESCRIPTION)
    address = config.address()
    before: FleetSample | None = None
    with router_client(address) as client:
        while True:
            try:
                sample = FleetSample(client.fleet(), time.monotonic())
            except (Unavailable, DeadlineExceeded) as error:
                _show_failing(config)
                if config.once or config.json or before is None:
                    raise
                print_out(paint(f"router {address}: {error}", "red"))  # it may be back soon
                time.sleep(config.interval)
                continue
            _show(sample, before, address, config)
            _show_failing(config)
            if config.once:
                decodes = (one.role == "decode" and one.healthy for one in sample.fleet.workers)
                return 0 if any(decodes) else 1
            before = sample
            time.sleep(config.interval)


def _show(sample: FleetSample, before: FleetSample | None, address: str, config: TopConfig) -> None:
    fleet = sample.fleet
    seconds = sample.at - before.at if before is not None else 0.0
    old = before.fleet if before is not None else None
    executed = {one.address: one.load.executed for one in old.workers} if old is not None else {}
    rows = [WorkerRow.of(one, executed.get(one.address), seconds) for one in fleet.workers]
    rates = ServedRates.between(old.totals if old is not None else None, fleet.totals, seconds)
    if config.json:
        status = {
            "router": address,
            "queue": asdict(fleet.queue),
            "totals": asdict(fleet.totals),
            "rates": asdict(rates),
            "workers": [asdict(row) for row in rows],
        }
        print_out(json.dumps(status))
        return
    if not config.once and coloured(sys.stdout):
        sys.stdout.write(HOME)
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    print_out(screen(rows, fleet, rates, address, columns))


def _show_failing(config: TopConfig) -> None:
    """The processes of the endpoints file that keep dying; the router may know nothing of them."""
    if config.endpoints is not None and not config.json:
        for one in processes_of(Path(config.endpoints)):
            if one.failing is not None:
                print_out(paint(f"{one.name} {one.address}: {one.failing}", "red"))


def _profiles(rows: Sequence[WorkerRow]) -> Iterator[str]:
    """Each numeric profile, and which workers have it if there are several."""
    known = [row for row in rows if row.numeric_profile]
    profiles = dict.fromkeys((row.numeric_profile, bool(row.numerics)) for row in known)
    for profile, strict in profiles:
        having = [
            r.address for r in known if (r.numeric_profile, bool(r.numerics)) == (profile, strict)
        ]
        mode = "strict" if strict else "loose"
        at = f" at {', '.join(having)}" if len(profiles) > 1 else ""
        yield f"numeric profile {profile} ({mode}){at}"


def screen(
    rows: Sequence[WorkerRow],
    fleet: FleetStatus,
    rates: ServedRates,
    address: str,
    columns: int = WIDTH,
) -> str:
    """The screen for people, at most ``columns`` wide (from 80 on)."""
    width, queue = max(columns, WIDTH), fleet.queue
    ready = sum(row.state == "ready" for row in rows)
    drains = f", drains {queue.tokens_per_second:,.0f}/s" if queue.tokens_per_second else ""
    waits = (
        f"{queue.running} of {queue.slots} requests running, {queue.waiting} waiting"
        f" ({queue.waiting_tokens:,} tokens{drains}), {queue.refused} refused so far"
    )
    others = [row.cells(0)[1:] for row in rows]
    taken = 2 + sum(2 + max(len(row[i]) for row in [HEAD[1:], *others]) for i in range(8))
    head, *body = table(HEAD, [row.cells(width - taken) for row in rows], RIGHT).splitlines()
    lines = [paint(f"router {address}: {ready} of {len(rows)} workers ready", "bold")]
    lines += [*_wrapped(waits, width), *_wrapped(str(rates), width)]
    for profile in _profiles(rows):
        lines += _wrapped(profile, width)
    lines += ["", head]
    for text, row in zip(body, rows, strict=True):
        state = paint(row.state, COLOURS.get(row.state, "dim"))
        lines.append(text.replace(f" {row.state} ", f" {state} ", 1))
        lines += _wrapped(row.reason, width, "    ")
    legend = (paint(line, "dim") for line in _wrapped(LEGEND, width))
    return "\n".join([*lines, "", *legend, ""])


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _restarted(before: RouterTotals, now: RouterTotals) -> bool:
    return (
        now.generation_tokens < before.generation_tokens or now.first_tokens < before.first_tokens
    )
