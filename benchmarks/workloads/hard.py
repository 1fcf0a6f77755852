"""Families of requests that are hard for a policy that learns: see ``benchmarks.evict --hard``.

What was learned turns out wrong, order of use alone decides, or a few prompts fill the store. No
parameter of the policy was chosen on them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.workloads import Chain, Event, Family, Numbers


def _zipf(chance: random.Random, count: int, exponent: float) -> Iterator[Event]:
    new = Numbers()
    documents = [new.take(chance.randrange(4, 20)) for _ in range(300)]
    weights = [(rank + 1) ** -exponent for rank in range(len(documents))]
    for number in range(count):
        yield number * 1.0, chance.choices(documents, weights)[0]


def flat(chance: random.Random, count: int) -> Iterator[Event]:
    """Documents of unequal popularity: Zipf's exponent is 0.6."""
    return _zipf(chance, count, 0.6)


def steep(chance: random.Random, count: int) -> Iterator[Event]:
    """Documents of unequal popularity: Zipf's exponent is 1.2."""
    return _zipf(chance, count, 1.2)


def loops(chance: random.Random, count: int) -> Iterator[Event]:
    """A few rounds over 110, 220, 330 or 1,100 blocks, then a loop over others."""
    new, number = Numbers(), 0
    while number < count:
        documents = [new.take(10) for _ in range(chance.choice((11, 22, 33, 110)))]
        rounds = documents * chance.randrange(2, 8)
        for document in rounds[: count - number]:
            yield number * 1.0, document
            number += 1


def turncoats(chance: random.Random, count: int) -> Iterator[Event]:
    """A document is read some ten times within minutes, and never again."""
    new = Numbers()
    live: list[Chain] = []
    for number in range(count):
        while len(live) < 100:
            live += [new.take(chance.randrange(4, 16))] * chance.randrange(6, 14)
        yield number * 1.0, live.pop(chance.randrange(len(live)))


def reversals(chance: random.Random, count: int) -> Iterator[Event]:
    """The rule turns every 150 requests: what is popular comes back, or only what is new."""
    new = Numbers()
    popular = [new.take(8) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(popular))]
    fresh = [new.take(8) for _ in range(10)]
    for number in range(count):
        if number // 150 % 2:
            if chance.random() < 0.25:
                fresh.append(new.take(8))
            yield number * 1.0, fresh[-1 - min(int(chance.expovariate(0.15)), len(fresh) - 1)]
        elif chance.random() < 0.7:
            yield number * 1.0, chance.choices(popular, weights)[0]
        else:
            yield number * 1.0, new.take(8)


def giant(chance: random.Random, count: int) -> Iterator[Event]:
    """One agent whose prompt grows to 200 blocks, beside 60 chats of a few blocks."""
    new, at = Numbers(), 0.0
    chats = [new.take(3) for _ in range(60)]
    agent = new.take(20)
    for _ in range(count):
        at += chance.expovariate(1.0)
        if chance.random() < 0.3:
            yield at, agent
            agent = agent + new.take(chance.randrange(1, 6)) if len(agent) < 200 else new.take(20)
            continue
        turn = chance.randrange(len(chats))
        yield at, chats[turn]
        chats[turn] = chats[turn] + new.take(1) if len(chats[turn]) < 12 else new.take(3)


def few(chance: random.Random, count: int) -> Iterator[Event]:
    """Four agents at a time, each with a prompt that grows to some 160 blocks."""
    new, at, turn = Numbers(), 0.0, 0
    system = new.take(4)
    agents = [system + new.take(chance.randrange(20, 120)) for _ in range(4)]
    for _ in range(count):
        at += chance.expovariate(0.1)
        if chance.random() < 0.35:
            turn = chance.randrange(len(agents))
        yield at, agents[turn]
        if len(agents[turn]) < 160 and chance.random() > 0.02:
            agents[turn] += new.take(chance.randrange(1, 5))
        else:
            agents[turn] = system + new.take(chance.randrange(20, 60))


def oversize(chance: random.Random, count: int) -> Iterator[Event]:
    """Prompts of 50 to 500 blocks, some longer than the store, among short ones that return."""
    new = Numbers()
    short = [new.take(8) for _ in range(60)]
    long = [new.take(chance.randrange(50, 500)) for _ in range(6)]
    for number in range(count):
        if chance.random() < 0.1:
            yield number * 1.0, chance.choice(long)
        else:
            yield number * 1.0, short[min(int(chance.expovariate(0.08)), len(short) - 1)]


def nights(chance: random.Random, count: int) -> Iterator[Event]:
    """Only the order of use counts, but pauses of hours and changes of pace move all ages."""
    new, at, pace = Numbers(), 0.0, 1.0
    recent = [new.take(10) for _ in range(40)]
    for number in range(count):
        if number % 400 == 0:
            at += 30000.0
            pace = chance.choice((0.05, 1.0, 20.0))
        at += chance.expovariate(1 / pace)
        if chance.random() < 0.25:
            recent.append(new.take(chance.randrange(4, 16)))
        back = min(int(chance.expovariate(0.1)), len(recent) - 1)
        recent.append(recent.pop(-1 - back))
        yield at, recent[-1]


def stack(chance: random.Random, count: int) -> Iterator[Event]:
    """200 documents, none of them new: how many others were used since decides alone."""
    new = Numbers()
    recent = [new.take(chance.randrange(2, 22)) for _ in range(200)]
    for number in range(count):
        back = min(int(chance.expovariate(0.06)), len(recent) - 1)
        recent.append(recent.pop(-1 - back))
        yield number * 1.0, recent[-1]


def crowds(chance: random.Random, count: int) -> Iterator[Event]:
    """Every minute a document of 40 blocks is asked for forty times, then never again."""
    new, at = Numbers(), 0.0
    usual = [new.take(10) for _ in range(80)]
    hot: Chain = ()
    for number in range(count):
        at += chance.expovariate(2.0)
        if number % 120 == 0:
            hot = new.take(40)
        if number % 120 < 60 and chance.random() < 0.7:
            yield at, hot + new.take(1)
        else:
            back = min(int(chance.expovariate(0.05)), len(usual) - 1)
            yield at, usual[back] + new.take(1)


def periods(chance: random.Random, count: int) -> Iterator[Event]:
    """80 jobs, each repeated at a period of its own between 20 seconds and 43 minutes."""
    new = Numbers()
    events: list[Event] = []
    for _ in range(80):
        period = 20.0 * 2.0 ** chance.uniform(0.0, 7.0)
        job = new.take(chance.randrange(4, 20))
        at = chance.uniform(0.0, period)
        while at < 2.0 * count:
            events.append((at, job))
            at += period * chance.uniform(0.9, 1.1)
    yield from sorted(events)[:count]


def branches(chance: random.Random, count: int) -> Iterator[Event]:
    """A tree search continues one of the newest leaves, or goes back; sixty steps a tree."""
    new, at = Numbers(), 0.0
    tree: list[Chain] = []
    for number in range(count):
        at += chance.expovariate(0.5)
        if number % 60 == 0:
            tree = [new.take(chance.randrange(4, 30))]
        back = min(int(chance.expovariate(0.4)), len(tree) - 1)
        tree.append(tree[-1 - back] + new.take(chance.randrange(1, 6)))
        yield at, tree[-1]


HARD: tuple[Family, ...] = (
    flat,
    steep,
    loops,
    turncoats,
    reversals,
    giant,
    few,
    oversize,
    nights,
    stack,
    crowds,
    periods,
    branches,
)
