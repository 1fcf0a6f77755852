"""Kills at random for as long as asked, fifty streams at once, every token and usage compared.

Every other stream goes over HTTP, and is resumed with the id of its last event.

    python -m tests.failures.chaos --minutes 30 --seed 7

In a round, processes get SIGKILL, SIGSTOP or SIGTERM while streams run; then the same requests are
sent to the undisturbed cluster. The seed gives the same prompts and the same signals; where in a
stream's life a signal arrives is up to the machine.

A stream that meets two dying workers within its first tokens on each is refused, as a request that
kills workers is, and its client resumes it. The router refuses such requests for 0 seconds here, so
that the client can resume at once; all other settings are the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from kvrelay import AsyncClient
from tests.exact.idle import check_idle
from tests.failures.http_streams import HttpStream
from tests.failures.rig import Rig, rig
from tests.failures.streams import PATIENCE, Stream, draw, undisturbed
from tests.models import tiny_model

AT_ONCE = 50
ROUND_SECONDS = 20.0
BLOWS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
STOPPED_SECONDS = (0.2, 3.0)
PAUSE_SECONDS = (0.3, 2.5)
IDLE_SECONDS = 15.0  # a save that was cut off gives its blocks back at its deadline


@dataclass(frozen=True, slots=True)
class Blow:
    """After ``after`` seconds, ``number`` to a process; SIGCONT ``later`` seconds after SIGSTOP."""

    after: float
    role: str
    index: int
    number: signal.Signals
    later: float


def plan(chance: random.Random, seconds: float) -> list[Blow]:
    """The signals of one round."""
    made: list[Blow] = []
    while sum(blow.after for blow in made) < seconds:
        role = chance.choice(("prefill", "decode", "decode", "store", "router"))
        number = chance.choice(BLOWS)
        index = chance.randrange(2) if role in ("prefill", "decode") else 0
        after, later = chance.uniform(*PAUSE_SECONDS), chance.uniform(*STOPPED_SECONDS)
        made.append(Blow(after, role, index, number, later))
    return made


class Round:
    """Streams, and signals to the processes that serve them."""

    def __init__(self, stand: Rig, chance: random.Random) -> None:
        self._stand = stand
        self._chance = chance
        self._until = 0.0
        self.done: list[Stream | HttpStream] = []
        self.blows: Counter[str] = Counter()

    async def play(self) -> None:
        """Run until every signal was sent and every stream has ended."""
        blows = plan(self._chance, ROUND_SECONDS)
        self._until = time.monotonic() + ROUND_SECONDS
        address = self._stand.cluster.router
        url = self._stand.cluster.http
        assert url is not None
        limits = httpx2.Limits(max_connections=None)
        async with (
            AsyncClient(address) as client,
            httpx2.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as plain,
            asyncio.TaskGroup() as group,
        ):
            for number in range(AT_ONCE):
                chance = random.Random(self._chance.random())
                group.create_task(self._streams(plain if number % 2 else client, chance))
            for blow in blows:
                await asyncio.sleep(blow.after)
                group.create_task(self._strike(blow))

    async def _streams(
        self, client: AsyncClient | httpx2.AsyncClient, chance: random.Random
    ) -> None:
        while time.monotonic() < self._until:
            (query,) = draw(chance, 1, chance.randrange(4, 200), chance.randrange(1, 120))
            stream: Stream | HttpStream
            if isinstance(client, httpx2.AsyncClient):
                stream = HttpStream(query)
                await stream.run(client)
            else:
                stream = Stream(query)
                await stream.run(client, may_break=True, may_refuse=True)
            self.done.append(stream)

    async def _strike(self, blow: Blow) -> None:
        process = self._stand.cluster.process(blow.role, blow.index)
        if process.send(blow.number):
            self.blows[f"{blow.number.name} {blow.role}"] += 1
        if blow.number is signal.SIGSTOP:
            await asyncio.sleep(blow.later)
            process.send(signal.SIGCONT)

    def check(self) -> None:
        """Every stream has the tokens of an undisturbed run, and nothing is held."""
        self._stand.settle()
        again = undisturbed(self._stand.cluster.router, [stream.query for stream in self.done])
        for stream, expected in zip(self.done, again, strict=True):
            if stream.tokens != expected:
                raise AssertionError(f"{stream.query}\n{stream.tokens}\n{expected}")
            stream.check_usage()
        check_idle(self._stand.cluster, IDLE_SECONDS)


def run(minutes: float, seed: int) -> int:
    """The exit status: 0 if every token was right."""
    print(f"chaos for {minutes:g} minutes, seed {seed}", flush=True)
    chance, deadline = random.Random(seed), time.monotonic() + 60 * minutes
    blows, done = Counter[str](), list[Stream | HttpStream]()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", Path(folder) / "llama", eos_token_id=None)
        with rig(model, seqs=16, environ={"poison_seconds": "0"}, http=True) as stand:
            while time.monotonic() < deadline:
                one = Round(stand, random.Random(chance.random()))
                asyncio.run(one.play())
                one.check()
                blows, done = blows + one.blows, done + one.done
                print(f"{_said(done)}, {sum(blows.values())} signals", flush=True)
    print(f"{_said(done)}, {dict(sorted(blows.items()))}, seed {seed}")
    return 0


def _said(done: Sequence[Stream | HttpStream]) -> str:
    over_http = sum(isinstance(stream, HttpStream) for stream in done)
    resumed = sum(stream.broken > 0 for stream in done)
    refused = sum(stream.refused > 0 for stream in done)
    resumed_http = sum(stream.broken > 0 for stream in done if isinstance(stream, HttpStream))
    return (
        f"{len(done)} streams exact ({over_http} over HTTP), {resumed} resumed ({resumed_http}),"
        f" {refused} of them after a refusal"
    )


def main(argv: Sequence[str]) -> int:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.failures.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args(argv)
    return run(options.minutes, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
