"""Asks the server under examination; every answer's usage and cached tokens are checked.

The history of what was sent bounds what can be cached: no more than the longest beginning that a
prompt has in common with an earlier prompt and its answer, of the same salt.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvrelay.conform.abilities import Abilities
from kvrelay.conform.tally import NotSupported, Tally, Unanswered
from kvrelay.load.check import usage_faults
from kvrelay.load.draws import LengthDraw
from kvrelay.load.driver import clock, perform
from kvrelay.load.http_door import HttpDoor
from kvrelay.load.request import LoadAnswer, LoadRequest, Part, ServerAccount
from kvrelay.load.workload import WORDS

MOST_DELAY = 5.0  # seconds to wait after a refusal
SEEDS = 1 << 31
BYTES_OF_WORD = 4  # with its space; some tokenizers make a token of each


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformPlan:
    """How much is asked. ``flood``: tokens of other prompts that shall evict one from the cache.

    ``restarts``: how often ``restart_command`` restarts the server.
    """

    prompt: LengthDraw
    output: int = 32
    prompts: int = 4
    neighbours: int = 8
    flood: int = 16384
    vocabulary: int = 256
    temperature: float = 1.0
    sampled: bool = True
    seed: int = 0
    timeout: float = 300.0
    restart_command: str | None = None
    restarts: int = 1
    restart_timeout: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request of a check; ``name`` is for readers."""

    name: str
    prompt: Part
    max_tokens: int
    seed: int
    temperature: float = 0.0
    salt: str | None = None


class Exam:
    """One server being examined. ``asked`` counts requests; ``usage`` and ``cached`` are checks."""

    def __init__(self, door: HttpDoor, abilities: Abilities, plan: ConformPlan) -> None:
        self.plan = plan
        self.abilities = abilities
        self.chance = random.Random(f"{plan.seed}:conform")
        self.usage = Tally()
        self.cached = Tally()
        self.asked = 0
        self._door = door
        self._history: dict[tuple[str | None, int], list[Sequence[int]]] = defaultdict(list)
        self._salts = 0

    def prompt(self, length: int, after: Part | None = None) -> Part:
        """Tokens that were never sent, or words of about as many; behind ``after``."""
        drawn = tuple(self.chance.randrange(self.plan.vocabulary) for _ in range(length))
        if self.abilities.has("ids_in"):
            return (*(after or ()), *drawn) if not isinstance(after, str) else drawn
        words = " ".join(WORDS[one % len(WORDS)] for one in drawn[::BYTES_OF_WORD])
        return f"{after} {words}" if isinstance(after, str) else words

    def probe(self, name: str, sampled: bool, length: int | None = None) -> Probe:
        """With a new prompt."""
        drawn = self.plan.prompt.draw(self.chance) if length is None else length
        return Probe(
            name=name,
            prompt=self.prompt(drawn),
            max_tokens=self.plan.output,
            seed=self.chance.randrange(SEEDS),
            temperature=self.plan.temperature if sampled else 0.0,
        )

    def salted(self, probe: Probe) -> Probe:
        """The same request with a salt of its own, so that nothing of it is cached."""
        self._salts += 1
        return replace(probe, salt=f"conform-{self.plan.seed}-{self._salts}")

    async def whole(
        self, probe: Probe, count: Callable[[int], None] = lambda tokens: None
    ) -> LoadAnswer:
        """The whole answer; ``Unanswered`` if there is none."""
        until = clock() + self.plan.timeout
        while True:
            answer = await self.part(probe, None, self.plan.timeout, count)
            if answer.ended == "refused" and clock() < until:
                await asyncio.sleep(min(answer.retry_after or 1.0, MOST_DELAY))
            elif answer.ended != "done":
                raise Unanswered(f"{probe.name}: {answer.error or answer.ended}")
            else:
                return answer

    async def part(
        self,
        probe: Probe,
        leave_after: int | None,
        timeout: float,  # noqa: ASYNC109 - the client leaves then
        count: Callable[[int], None] = lambda tokens: None,
    ) -> LoadAnswer:
        """What comes before the client leaves, after so many tokens or so many seconds."""
        request = self._request(probe, {}, leave_after)
        bound = self._bound(probe)
        self._sent(probe)
        answer = await perform(self._door, request, timeout, count=count)
        self._sent(probe, answer)
        if answer.ended == "done":
            self._check_usage(probe, answer)
            self._check_cached(probe, answer, bound)
        return answer

    async def samples(self, probe: Probe, count: int) -> list[LoadAnswer]:
        """``count`` samples of one request."""
        request = self._request(probe, {"n": count}, None)
        answers = [LoadAnswer(request, clock(), clock()) for _ in range(count)]
        account: ServerAccount | None = None
        self._sent(probe)
        async with asyncio.timeout(self.plan.timeout):
            async with aclosing(self._door.ask(request, self.plan.timeout)) as pieces:
                async for piece in pieces:
                    if not 0 <= piece.choice < count:
                        raise Unanswered(f"{probe.name}: choice {piece.choice} of {count}")
                    account = piece.account or account
                    answers[piece.choice].take(replace(piece, account=None))
        if (came := sum(answer.finish is not None for answer in answers)) < count:
            raise NotSupported(f"{came} of {count} samples came")
        for answer in answers:
            answer.ended = "done"
            self._sent(probe, answer)
        ids = [answer.ids for answer in answers if answer.ids is not None]
        if self.abilities.has("usage") and len(ids) == count:
            sent, told = sum(map(len, ids)), account.completion_tokens if account else None
            said = f"{probe.name}: completion_tokens is {told}, and {sent} tokens came of n"
            self.usage.expect(None if told == sent else said)
        return answers

    def _request(
        self, probe: Probe, fields: dict[str, object], leave_after: int | None
    ) -> LoadRequest:
        self.asked += 1
        given = {**self.abilities.fields, "temperature": probe.temperature, **fields}
        if probe.salt is not None:
            given["cache_salt"] = probe.salt
        return LoadRequest(
            number=self.asked,
            parts=(probe.prompt,),
            max_tokens=probe.max_tokens,
            seed=probe.seed,
            leave_after=leave_after,
            fields=given,
        )

    def _sent(self, probe: Probe, answer: LoadAnswer | None = None) -> None:
        """Remember what the server may have cached from now on."""
        sent = _units(probe.prompt)
        if answer is not None:
            said = answer.text if isinstance(probe.prompt, str) else tuple(answer.ids or ())
            sent = (*sent, *_units(said))
        self._history[probe.salt, sent[0]].append(sent)

    def _bound(self, probe: Probe) -> int:
        """The most tokens of the prompt that can be cached; the server may add some of its own."""
        sent = _units(probe.prompt)
        return max((_common(sent, one) for one in self._history[probe.salt, sent[0]]), default=0)

    def _check_usage(self, probe: Probe, answer: LoadAnswer) -> None:
        if not self.abilities.has("usage"):
            return
        ids_sent = self.abilities.has("ids_in") and not self.abilities.overhead
        faults = list(usage_faults(answer, ids_sent))
        self.usage.expect(f"{probe.name}: {'; '.join(faults)}" if faults else None)

    def _check_cached(self, probe: Probe, answer: LoadAnswer, bound: int) -> None:
        cached = cached_of(answer)
        if cached is None or not self.abilities.has("cached"):
            return
        most = bound + self.abilities.overhead
        said = f"{probe.name}: cached_tokens is {cached}; only the first {most} were sent before"
        self.cached.expect(None if cached <= most else said)


def cached_of(answer: LoadAnswer) -> int | None:
    """The cached tokens of its prompt, if the server says."""
    return None if answer.account is None else answer.account.sources.get("cached")


def _units(part: Part) -> Sequence[int]:
    """Token ids, or bytes: a text has no more tokens than bytes."""
    return part.encode() if isinstance(part, str) else part


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class Crowd:
    """Other requests, each followed by a new one, that are open while a check runs."""

    def __init__(self, exam: Exam, lengths: LengthDraw, output: int) -> None:
        self.received = 0  # tokens of all of them
        self.streaming = 0  # those that have begun to answer and have not ended
        self._exam = exam
        self._lengths = lengths
        self._output = output
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        """Return when the first token of any of them, or the end of its answer, has come."""
        exam = self._exam
        self._tasks = [
            asyncio.create_task(self._neighbour(exam.abilities.has("seed") and number % 2 == 1))
            for number in range(exam.plan.neighbours)
        ]
        first = asyncio.create_task(self._first.wait())
        try:
            await asyncio.wait((first, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.__aexit__(asyncio.CancelledError)
            raise
        finally:
            first.cancel()
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and raised[0] is None:
                raise error

    async def _neighbour(self, sampled: bool) -> None:
        exam = self._exam
        while True:
            probe = exam.probe("a neighbour", sampled, self._lengths.draw(exam.chance))
            begun = False

            def count(tokens: int) -> None:
                nonlocal begun
                self.received += tokens
                if tokens and not begun:
                    begun = True
                    self.streaming += 1
                    self._first.set()

            try:
                await exam.whole(replace(probe, max_tokens=self._output), count)
                self._first.set()
            finally:
                self.streaming -= begun


async def in_crowd(
    exam: Exam, probes: Sequence[Probe], crowd: Crowd
) -> tuple[list[LoadAnswer], int]:
    """Send the probes at once, in a crowd: the answers, and how many overlapped another request.

    Overlap: another request has tokens between the answer's first and last one, or streams during
    most of its events, which is how it looks if this process reads late.
    """

    async def ask(probe: Probe) -> tuple[LoadAnswer, bool]:
        seen = [0, 0]  # events without and with a neighbour that is streaming
        received: list[int] = []

        def count(tokens: int) -> None:
            seen[crowd.streaming > 0] += tokens > 0
            received.append(crowd.received)

        answer = await exam.whole(probe, count)
        return answer, received[-1] > received[0] or seen[True] > seen[False]

    async with crowd:
        found = await asyncio.gather(*map(ask, probes))
    return [answer for answer, _ in found], sum(shared for _, shared in found)


async def restart(exam: Exam, number: int) -> None:
    """Run the user's command and wait until the server answers."""
    process = await asyncio.create_subprocess_shell(
        exam.plan.restart_command or "false",
        env={**os.environ, "KVRELAY_RESTART": str(number)},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(exam.plan.restart_timeout):
            if status := await process.wait():
                raise Unanswered(f"the restart command ended with status {status}")
            probe = replace(exam.probe("after the restart", False, 4), max_tokens=1)
            while True:
                if (await exam.part(probe, None, exam.plan.timeout)).ended == "done":
                    return
                await asyncio.sleep(0.5)
    except TimeoutError:
        limit = exam.plan.restart_timeout
        raise Unanswered(f"the server did not come back within {limit:g} s") from None
