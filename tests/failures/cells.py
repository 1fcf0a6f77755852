"""One cell of the kill matrix: signal a process at a moment, then compare tokens and accounts."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from kvrelay import Client
from kvrelay.usage import LegUsage
from tests.exact.idle import check_idle
from tests.exact.oracle import Oracle
from tests.failures.moments import BEFORE, LAST, LOADING, MIDDLE, Moment, Scene
from tests.failures.rig import BLOCK, Observer, Rig, Seen
from tests.failures.streams import Query, Stream, draw, run_all, undisturbed

MOMENT_SECONDS = 60.0
TIE = 1e-4  # of logits, which differ by up to 6e-5 between one way to compute them and another
MORE_TRIES = 5
FREE_WITHIN = 1.0  # seconds, after SIGCONT
ROUTER_SECONDS = 2.0  # that a stopped router is silent


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal: the process, the time, and the state of workers and streams then."""

    index: int
    at: float
    loads: tuple[Seen, ...]
    met: bool  # whether any stream was still under way
    tokens: tuple[int, ...]  # of each stream, when the loads were asked for


class Cell:
    """``target`` is a role; the streams begin before the moment, or just after for ``BEFORE``.

    A stopped router continues after ``silent`` seconds, another process after the streams.
    """

    def __init__(
        self,
        rig: Rig,
        oracle: Oracle,
        target: str,
        moment: Moment,
        seed: int,
        silent: float = ROUTER_SECONDS,
    ) -> None:
        self.rig = rig
        self.target = target
        self.moment = moment
        self.silent = silent
        self._oracle = oracle
        # The role that the moment is about: that of the party struck, if it can be.
        self.role = target if target in ("prefill", "decode") else self._subject(moment)
        self._chance = random.Random(seed)
        print(f"cell {target}, {moment.name}: seed {seed}")
        self.streams: list[Stream] = []

    def _subject(self, moment: Moment) -> str:
        return "decode" if moment is LOADING else "prefill"

    def run(self, number: int = signal.SIGKILL) -> Strike:
        """Run the cell; every process serves again when it returns."""
        strike = self._try(number)
        for _ in range(MORE_TRIES):  # on a busy machine a stream may be over before the signal
            if self._fell_in_time(strike) or self.moment is LAST:
                break
            strike = self._try(number)
        else:
            raise AssertionError(f"{self.moment.name!r} was missed {MORE_TRIES} times")
        return strike

    def _fell_in_time(self, strike: Strike) -> bool:
        """Whether a stream was cut. On a busy machine a stream may be over while its client still
        reads it: in mid-stream, a decode worker was hit only if another one continued.
        """
        taken_over = self.target != "decode" or self.moment is not MIDDLE or bool(self.recomputed())
        return strike.met and taken_over

    def _try(self, number: int) -> Strike:
        self.streams = [Stream(one) for one in self._draw()]
        self._prepare()
        strike = asyncio.run(self._play(number))
        if number == signal.SIGSTOP:
            self.rig.cluster.kill(self.target, strike.index, signal.SIGCONT)
            waited = check_idle(self.rig.cluster, within=FREE_WITHIN)
            print(f"idle {waited:.2f} s after SIGCONT")
        self.rig.settle()
        return strike

    def _draw(self) -> list[Query]:
        """Prompts whose greedy answers rounding cannot change: recomputation, or
        another library, rounds differently, and one answer in some hundred has such a token."""
        while True:
            drawn = draw(
                self._chance, self.moment.streams, self.moment.prompt, self.moment.max_tokens
            )
            if self.moment.streams > 2 or not any(map(self._tied, drawn)):
                return drawn

    def _tied(self, query: Query) -> bool:
        if query.seed is not None:
            return False
        made = self._oracle.greedy(query.prompt, query.max_tokens)
        return self._oracle.gap(query.prompt, made) < TIE

    def _prepare(self) -> None:
        if self.moment is LOADING and self.role == "prefill":
            # What it will load has to be in the store, and no longer in its own pool.
            undisturbed(self.rig.cluster.router, [stream.query for stream in self.streams])
            self.rig.restart("prefill")
        self.moment.prepare(self.rig, self.role)
        if self.target == "router" and self.moment is MIDDLE:
            self.rig.gate.close()  # until the signal: no stream has ended by then

    async def _play(self, number: int) -> Strike:
        observer = Observer(self.rig)
        try:
            before = {(s.role, s.index): s.load.executed for s in await observer.look()}
            if self.moment is BEFORE:
                strike = self._strike(0, (), number)
                await self._stream()
                return strike
            streams = asyncio.ensure_future(self._stream())
            strike = await self._wait(observer, before, streams, number)
            await streams
            return strike
        finally:
            await observer.close()

    async def _stream(self) -> None:
        await run_all(self.rig.cluster.router, self.streams, self.target == "router")

    async def _wait(
        self,
        observer: Observer,
        before: dict[tuple[str, int], int],
        streams: asyncio.Future[None],
        number: int,
    ) -> Strike:
        deadline = time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < deadline and not streams.done():
            tokens = tuple(len(stream.tokens) for stream in self.streams)
            loads = await observer.look()
            most = max(len(stream.tokens) for stream in self.streams)
            index = self.moment.reached(Scene(loads, before, most), self.role)
            if index is not None:
                return self._strike(index, tuple(loads), number, tokens)
        self.rig.heal()
        await streams
        return Strike(0, time.monotonic(), (), False, ())

    def _strike(
        self, index: int, loads: tuple[Seen, ...], number: int, tokens: tuple[int, ...] = ()
    ) -> Strike:
        index = index if self.target == self.role else 0
        self.rig.cluster.kill(self.target, index, number)
        if number == signal.SIGSTOP and self.target == "router":
            go_on = partial(self.rig.cluster.kill, self.target, index, signal.SIGCONT)
            asyncio.get_running_loop().call_later(self.silent, go_on)
        self.rig.heal()  # what is slow or held was for reaching the moment, not for the recovery
        met = any(len(stream.tokens) < stream.query.max_tokens for stream in self.streams)
        return Strike(index, time.monotonic(), loads, met, tokens)

    def check(self, strike: Strike) -> None:
        """The tokens are those of an undisturbed run, all are accounted for, nothing is held."""
        queries = [stream.query for stream in self.streams]
        again = undisturbed(self.rig.cluster.router, queries)
        for stream, expected in zip(self.streams, again, strict=True):
            assert stream.tokens == expected
            self._check_greedy(stream.query, stream.tokens)
            stream.check_usage(known=self.moment is LOADING)
        waited = check_idle(self.rig.cluster)
        self._check_slots()
        pauses = [stream.pause_after(strike.at) for stream in self.streams]
        print(
            f"MATRIX {self.target:7} {self.moment.name:27} longest pause {max(pauses):6.3f} s,"
            f" recomputed {self.recomputed()} (unsaved {unsaved(strike)}), retried by the client"
            f" {sum(stream.broken for stream in self.streams)}, idle after {waited:.2f} s"
        )

    def _check_slots(self) -> None:
        """The router holds nothing either: no slot, no place in its queue, no leg."""
        with Client(self.rig.cluster.router) as client:
            fleet = client.fleet()
        assert (fleet.queue.running, fleet.queue.waiting, fleet.queue.waiting_tokens) == (0, 0, 0)
        assert not any(worker.in_flight for worker in fleet.workers), fleet

    def recomputed(self) -> list[int]:
        """Of each leg after a lost one: tokens computed, less the one that every leg computes."""
        return [leg.computed - 1 for stream in self.streams for _, leg in _resumed(stream)]

    def beyond(self, strike: Strike) -> int:
        """The most of ``recomputed`` that were neither being saved nor made after the last look."""
        beyond = []
        for stream, tokens in zip(self.streams, strike.tokens, strict=True):
            for lost, leg in _resumed(stream):
                since = max(0, 1 + lost.generated - tokens)
                beyond.append(leg.computed - 1 - since - unsaved(strike))
        return max(beyond, default=0)

    def _check_greedy(self, query: Query, tokens: list[int]) -> None:
        if query.seed is None and self.moment.streams <= 2:
            assert tokens == self._oracle.greedy(query.prompt, query.max_tokens)


def _resumed(stream: Stream) -> list[tuple[LegUsage, LegUsage]]:
    """Each lost leg with the leg after it."""
    legs = stream.usage.legs if stream.usage is not None else ()
    return [(lost, leg) for lost, leg in pairwise(legs) if lost.lost and not leg.lost]


def unsaved(strike: Strike) -> int:
    """Tokens in saves that were under way, at most."""
    return sum(seen.load.saving for seen in strike.loads if seen.role == "decode") * BLOCK
