"""The checks: each disturbs requests in one way and compares with what they answered alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeAlias

from kvrelay.conform.exam import Crowd, Exam, Probe, cached_of, in_crowd, restart
from kvrelay.conform.tally import NotSupported, NotTried, Tally, difference, is_untold
from kvrelay.load.draws import LengthDraw
from kvrelay.load.request import LoadAnswer

KINDS = ("greedy", "sampled")
ATTEMPTS = 3  # at requests that are answered together, and at a prompt that is cached
CUTS = 3  # of each answer that is resumed
TELLING = 8  # sampled tokens that are hardly equal by chance
SAMPLES = 3
SHARES = (0, 1, 15, 16, 17, 40, 127, 128, 130, 200)  # tokens that two prompts have in common
LONG = LengthDraw("uniform", (512, 768))
SHORT = LengthDraw("uniform", (1, 8))
FLOOD_PROMPT = 512
MOST_VICTIMS = 6  # each asked after twice as many tokens
PAUSE = 0.1  # seconds after a request that a restarting server did not answer


@dataclass(slots=True)
class Subject:
    """Probes of one kind of sampling and what they answered alone, when they were new."""

    exam: Exam
    sampled: bool
    probes: list[Probe]
    alone: list[LoadAnswer]

    @classmethod
    async def ask(cls, exam: Exam, sampled: bool) -> Subject:
        kind = "sampled" if sampled else "greedy"
        count = exam.plan.prompts
        probes = [exam.probe(f"{kind} prompt {number}", sampled) for number in range(count)]
        return cls(exam, sampled, probes, [await exam.whole(probe) for probe in probes])

    def pairs(self) -> list[tuple[Probe, LoadAnswer]]:
        return list(zip(self.probes, self.alone, strict=True))


Disturb: TypeAlias = Callable[[Subject, Tally], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table. ``disturb`` raises ``NotSupported`` where it cannot be run."""

    name: str
    title: str
    disturb: Disturb
    kinds: tuple[str, ...] = KINDS


async def repeat(subject: Subject, tally: Tally) -> None:
    """Ask again alone: a server that caches has the prompt now."""
    hits = []
    for probe, alone in subject.pairs():
        again = await subject.exam.whole(probe)
        tally.compare(probe.name, alone, again)
        hits.append(cached_of(again))
    if any(hits):
        tally.notes.append(f"{sum(map(bool, hits))} of {len(hits)} prompts were cached")
    elif subject.exam.abilities.has("cached"):
        tally.notes.append("no prompt was cached")


async def cold(subject: Subject, tally: Tally) -> None:
    """Ask again with a new salt: everything is computed again."""
    _need(subject, "salt")
    for probe, alone in subject.pairs():
        tally.compare(probe.name, alone, await subject.exam.whole(subject.exam.salted(probe)))


async def prefix_hit(subject: Subject, tally: Tally) -> None:
    """With a salt in which another prompt left a part of this one."""
    exam, hits = subject.exam, 0
    _need(subject, "salt")
    for probe, alone in subject.pairs():
        salted = exam.salted(probe)
        size = len(probe.prompt)
        shared = probe.prompt[: exam.chance.randrange(size // 2, size)]
        other = exam.prompt(16, shared)
        await exam.whole(replace(salted, name="a prompt that shares", prompt=other))
        answer = await exam.whole(salted)
        hits += bool(cached_of(answer))
        tally.compare(probe.name, alone, answer)
    if exam.abilities.has("cached"):
        tally.notes.append(f"{hits} of {len(subject.probes)} prompts were cached in part")


def neighbours(lengths: LengthDraw | None, output: int | None) -> Disturb:
    """Among other requests; their prompts are as long as the probes' without ``lengths``."""

    async def run(subject: Subject, tally: Tally) -> None:
        plan, shared = subject.exam.plan, 0
        for _ in range(ATTEMPTS):
            crowd = Crowd(subject.exam, lengths or plan.prompt, output or 2 * plan.output)
            answers, shared = await in_crowd(subject.exam, subject.probes, crowd)
            for (probe, alone), answer in zip(subject.pairs(), answers, strict=True):
                tally.compare(probe.name, alone, answer)
            if shared:
                return
        if tally.compared and not tally.differing:
            raise NotSupported("the server answered one request at a time")

    return run


async def abort(subject: Subject, tally: Tally) -> None:
    """Leave during the prompt, and during the answer; then ask again."""
    exam = subject.exam
    for probe, alone in subject.pairs():
        left = exam.salted(probe) if exam.abilities.has("salt") else probe
        first = max((alone.first or alone.sent) - alone.sent, 1e-3)
        await exam.part(left, None, first * exam.chance.uniform(0.1, 0.9))
        cut = exam.chance.randrange(1, max(alone.tokens, 2))
        part = await exam.part(left, cut, exam.plan.timeout)
        tally.compare(f"{probe.name}, left after {cut} tokens", alone, part)
        tally.compare(f"{probe.name}, asked again", alone, await exam.whole(left))


async def resume(subject: Subject, tally: Tally) -> None:
    """Send the prompt and the tokens so far as a prompt: the rest must follow."""
    exam = subject.exam
    _need(subject, "ids_in", "ids_out")
    goes_on = False  # a rest too long to be equal by chance was equal
    for probe, alone in subject.pairs():
        prompt, ids = probe.prompt, tuple(alone.ids or ())
        if isinstance(prompt, str) or len(ids) < 2:
            continue
        for cut in sorted(exam.chance.sample(range(1, len(ids)), min(CUTS, len(ids) - 1))):
            rest = replace(
                probe,
                name=f"{probe.name}, resumed after {cut}",
                prompt=(*prompt, *ids[:cut]),
                max_tokens=probe.max_tokens - cut,
            )
            equal = tally.compare(rest.name, alone, await exam.whole(rest), cut)
            goes_on |= equal and rest.max_tokens >= TELLING
    if subject.sampled and tally.differing and not goes_on:
        said = f"{tally.differing} of {tally.compared} rests differ"
        tally.differing = 0
        tally.differences.clear()
        raise NotSupported(f"a seed's draws begin anew with a new prompt: {said}")


async def samples(subject: Subject, tally: Tally) -> None:
    """``n`` samples, twice; greedy ones are all the same."""
    exam, numbered = subject.exam, True
    _need(subject, "samples", *([] if subject.sampled else ["greedy samples"]))
    for probe, alone in subject.pairs():
        first, second = [await exam.samples(probe, SAMPLES) for _ in range(2)]
        for at, (one, other) in enumerate(zip(first, second, strict=True)):
            tally.compare(f"{probe.name}, sample {at} again", one, other)
            if not subject.sampled:
                tally.compare(f"{probe.name}, sample {at}", alone, one)
            elif numbered:
                single = await exam.whole(replace(probe, seed=probe.seed + at))
                numbered = (single.ids, single.text) == (one.ids, one.text)
    if subject.sampled and tally.compared:
        ending = "" if numbered else " not"
        tally.notes.append(f"sample i is{ending} the answer to seed + i")


async def seeds(subject: Subject, tally: Tally) -> None:
    """Other seeds must give other answers, or the other checks of sampling mean nothing."""
    exam, other, drawn = subject.exam, 0, 0
    for probe, alone in subject.pairs():
        greedy = await exam.whole(replace(probe, temperature=0.0))
        answer = await exam.whole(replace(probe, seed=probe.seed + 1000))
        if all(map(is_untold, (alone, answer, greedy))):
            tally.untold += 1
            continue
        other += difference(alone, answer) is not None
        drawn += difference(alone, greedy) is not None
        tally.expect(None)
    if tally.compared and not other:
        why = "seeds are ignored" if drawn else "the model is certain, or nothing is sampled"
        raise NotSupported(f"no seed changed an answer: {why}")
    if tally.compared:
        tally.notes.append(f"another seed changed {other} of {tally.compared} answers")


async def eviction(subject: Subject, tally: Tally) -> None:
    """Send other prompts until the server has forgotten, then ask again."""
    exam, evicted, sent = subject.exam, 0, 0
    victims = subject.pairs()[:MOST_VICTIMS]
    for probe, alone in victims:  # whatever was evicted by the other checks
        tally.compare(probe.name, alone, await exam.whole(probe))
    before = [await _cached(exam, probe) for probe, _ in victims]
    if exam.abilities.has("cached") and not any(before):
        raise NotSupported("no prompt was cached")
    share = exam.plan.flood / (2 ** len(victims) - 1)
    for index, (probe, alone) in enumerate(victims):
        until = 0 if evicted else share * (2 ** (index + 1) - 1)
        while sent < until:
            filler = exam.probe("a prompt that evicts", False, FLOOD_PROMPT)
            await exam.whole(replace(filler, max_tokens=1))
            sent += FLOOD_PROMPT
        answer = await exam.whole(probe)
        evicted += before[index] > (cached_of(answer) or 0)
        tally.compare(f"{probe.name}, after {sent:,} other tokens", alone, answer)
    if not exam.abilities.has("cached"):
        tally.notes.append("the server does not say whether it evicted anything")
    elif not evicted and not tally.differing:
        raise NotSupported(f"{sent:,} tokens evicted nothing; raise --flood, or cache less")
    tally.notes.append(f"{evicted} of {len(before)} prompts were evicted")


async def _cached(exam: Exam, probe: Probe) -> int:
    """Cached tokens of a prompt that was sent before; asks again, since processes may not share."""
    for _ in range(ATTEMPTS):
        if cached := cached_of(await exam.whole(probe)):
            return cached
    return 0


async def salts(subject: Subject, tally: Tally) -> None:
    """What one salt has cached, no other one and no request without a salt may hit."""
    exam = subject.exam
    _need(subject, "salt", "cached")
    hits = 0
    for index in range(len(subject.probes)):
        probe = exam.salted(exam.probe(f"salted prompt {index}", subject.sampled))
        alone = await exam.whole(probe)
        for name, other in (
            ("another salt", exam.salted(probe)),
            ("no salt", replace(probe, salt=None)),
        ):
            answer = await exam.whole(other)
            cached = cached_of(answer) or 0
            tally.compare(f"{probe.name}, {name}", alone, answer)
            said = f"{probe.name}, {name}: {cached} of its prompt tokens were cached"
            tally.expect(said if cached > exam.abilities.overhead else None)
        tally.compare(f"{probe.name}, its own salt", alone, await exam.whole(probe))
        hits += bool(await _cached(exam, probe))
    if not hits and not tally.differing:
        raise NotSupported("no prompt was cached, not even with its own salt")
    tally.notes.append(f"{hits} of {len(subject.probes)} prompts were cached for their own salt")


async def shared_prefixes(subject: Subject, tally: Tally) -> None:
    """Prompts that share so many tokens: the counts of all answers are checked by the exam."""
    exam = subject.exam
    _need(subject, "cached")
    longest = max(SHARES)
    first = exam.probe("the prompt that others share", False, longest + 8)
    await exam.whole(first)
    for shared in SHARES:
        begin = first.prompt[: shared * (1 if exam.abilities.has("ids_in") else 5)]
        other = replace(first, name=f"a prompt that shares {shared}", prompt=exam.prompt(24, begin))
        await exam.whole(replace(other, max_tokens=1))


async def restarts(subjects: Sequence[Subject], tallies: Sequence[Tally]) -> None:
    """Restart the server while requests are open, then ask again.

    What came of an answer that broke must be the beginning of the whole one.
    """
    exam = subjects[0].exam
    if exam.plan.restart_command is None:
        raise NotTried("give --restart-command")
    for number in range(1, exam.plan.restarts + 1):
        ended = asyncio.Event()
        asked = [asyncio.create_task(_ask_on(subject, ended)) for subject in subjects]
        try:
            await restart(exam, number)
        finally:
            ended.set()
            found = await asyncio.gather(*asked)
        for subject, tally, (answers, unanswered) in zip(subjects, tallies, found, strict=True):
            broken = sum(answer.ended != "done" for _, answer in answers)
            said = f"{len(answers)} answers meanwhile, {broken} broke, {unanswered} were refused"
            tally.notes.append(f"restart {number}: {said}")
            alone = dict(subject.pairs())
            for probe, answer in answers:
                tally.compare(f"{probe.name}, during restart {number}", alone[probe], answer)
            for probe in subject.probes:
                answer = await exam.whole(probe)
                tally.compare(f"{probe.name}, after restart {number}", alone[probe], answer)


async def _ask_on(
    subject: Subject, ended: asyncio.Event
) -> tuple[list[tuple[Probe, LoadAnswer]], int]:
    """Ask, one probe after the other, until the server has come back; and how often in vain."""
    found, unanswered = [], 0
    for probe in cycle(subject.probes):
        if ended.is_set():
            break
        answer = await subject.exam.part(probe, None, subject.exam.plan.timeout)
        if answer.tokens:
            found.append((probe, answer))
        else:
            unanswered += 1
            await asyncio.sleep(PAUSE)
    return found, unanswered


def _need(subject: Subject, *names: str) -> None:
    """Raises ``NotSupported`` if the server lacks one of these abilities."""
    for name in names:
        if (why := subject.exam.abilities.missing.get(name)) is not None:
            raise NotSupported(why)


CHECKS: tuple[Check, ...] = (
    Check("repeat", "the same request again", repeat),
    Check("cold", "computed again (new salt)", cold),
    Check("prefix", "after a hit in part", prefix_hit),
    Check("neighbours", "among others", neighbours(None, None)),
    Check("short", "among short prompts", neighbours(SHORT, 64)),
    Check("long", "among long prompts", neighbours(LONG, 4)),
    Check("abort", "left, asked again", abort),
    Check("resume", "resumed from tokens", resume),
    Check("samples", "n samples", samples),
    Check("seeds", "other seeds differ", seeds, KINDS[1:]),
    Check("salts", "salts keep apart", salts),
    Check("evicted", "evicted, computed again", eviction),
)
RESTART = ("restart", "restarted")
CACHED = ("cached", "cached token counts")
USAGE = ("usage", "usage sums")
NAMES = (*(check.name for check in CHECKS), *(name for name, _ in (RESTART, CACHED, USAGE)))
