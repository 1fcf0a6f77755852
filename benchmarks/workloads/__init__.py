"""Families of requests, each made from a seed: what a store's eviction may meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.trace.requests import BLOCK_TOKENS, ID_BYTES, TraceRequest

Chain = tuple[int, ...]
Event = tuple[float, Chain]


class Numbers:
    """New block ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Chain:
        """So many ids that were never taken before."""
        self._next += count
        return tuple(range(self._next - count, self._next))


def requests(events: Iterable[Event]) -> list[TraceRequest]:
    """In order of time; every block is full."""
    return [
        TraceRequest(at, len(c) * BLOCK_TOKENS, 1, tuple(n.to_bytes(ID_BYTES, "little") for n in c))
        for at, c in sorted(events)
    ]


def oneshots(chance: random.Random, count: int) -> Iterator[Event]:
    """Four system prompts, and behind them what never comes again."""
    new = Numbers()
    systems = [new.take(8) for _ in range(4)]
    for number in range(count):
        (system,) = chance.choices(systems, (8, 4, 2, 1))
        yield number * 0.5, system + new.take(chance.randrange(2, 20))


def conversations(chance: random.Random, count: int) -> Iterator[Event]:
    """Turns after think times of a minute or so, each with all that went before."""
    new = Numbers()
    system = new.take(3)
    left, start = count, 0.0
    while left > 0:
        start += chance.expovariate(0.25)
        at, chain = start, system + new.take(chance.randrange(1, 8))
        for _ in range(min(left, int(chance.expovariate(0.25)) + 1)):
            left -= 1
            yield at, chain
            at += chance.lognormvariate(4.0, 0.8)
            chain += new.take(chance.randrange(1, 5))


def scans(chance: random.Random, count: int) -> Iterator[Event]:
    """The same 100 documents of 12 blocks again and again in the same order."""
    new = Numbers()
    documents = [new.take(12) for _ in range(100)]
    for number in range(count):
        yield number * 1.0, documents[number % len(documents)]


def uniform(chance: random.Random, count: int) -> Iterator[Event]:
    """Any of 150 documents with the same chance: there is nothing to know."""
    new = Numbers()
    documents = [new.take(12) for _ in range(150)]
    for number in range(count):
        yield number * 1.0, chance.choice(documents)


def popular(chance: random.Random, count: int) -> Iterator[Event]:
    """Documents of unequal popularity (Zipf), each with a question of its own."""
    new = Numbers()
    documents = [new.take(10) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for number in range(count):
        (document,) = chance.choices(documents, weights)
        yield number * 0.7, document + new.take(2)


def agents(chance: random.Random, count: int) -> Iterator[Event]:
    """Loops of tool calls: the next turn after seconds, twenty or so of them, then never again."""
    new = Numbers()
    system = new.take(6)
    left, start = count, 0.0
    while left > 0:
        start += chance.expovariate(0.1)
        at, chain = start, system + new.take(chance.randrange(2, 6))
        for _ in range(min(left, chance.randrange(5, 35))):
            left -= 1
            yield at, chain
            at += chance.uniform(3.0, 20.0)
            chain += new.take(chance.randrange(1, 4))


def drift(chance: random.Random, count: int) -> Iterator[Event]:
    """What was used lately is used again, and nothing for long: made for the plain rule."""
    new = Numbers()
    recent = [new.take(10) for _ in range(40)]
    for number in range(count):
        if chance.random() < 0.3:
            recent.append(new.take(10))
        back = min(int(chance.expovariate(0.1)), len(recent) - 1)
        recent.append(recent.pop(-1 - back))
        yield number * 0.8, recent[-1]


def phases(chance: random.Random, count: int) -> Iterator[Event]:
    """Popular documents, then other ones, then conversations, then agents: all is unlearned."""
    parts: Sequence[Family] = (popular, drift, popular, conversations, agents)
    start, base = 0.0, 0
    for part in parts:
        end, top = start, base
        for at, chain in part(chance, count // len(parts)):
            moved = tuple(base + number for number in chain)
            yield start + at, moved
            end, top = max(end, start + at), max(top, moved[-1] + 1)
        start, base = end, top


def eager(chance: random.Random, count: int) -> Iterator[Event]:
    """Three conversations at a time that grow to some 20 blocks and come back at once."""
    new, at = Numbers(), 0.0
    chats = [new.take(chance.randrange(1, 6)) for _ in range(3)]
    for _ in range(count):
        at += chance.expovariate(1.0)
        turn = chance.randrange(len(chats))
        yield at, chats[turn]
        over = chance.random() < 0.15 or len(chats[turn]) > 20
        more = new.take(chance.randrange(1, 6 if over else 4))
        chats[turn] = more if over else chats[turn] + more


def bursts(chance: random.Random, count: int) -> Iterator[Event]:
    """What was used lately is used again, thirty times, then four documents are scanned."""
    new = Numbers()
    recent = [new.take(chance.randrange(4, 12)) for _ in range(30)]
    for number in range(count):
        if number % 34 >= 30:
            yield number * 1.0, new.take(12)
            continue
        if chance.random() < 0.15:
            recent.append(new.take(chance.randrange(4, 12)))
        back = min(int(chance.expovariate(0.12)), len(recent) - 1)
        recent.append(recent.pop(-1 - back))
        yield number * 1.0, recent[-1]


def retrieval(chance: random.Random, count: int) -> Iterator[Event]:
    """Questions on a few of 2,000 documents, best first: only a beginning in the same order hits.

    What is asked for changes: the documents' popularity (Zipf) is drawn anew every 500 requests.
    """
    new = Numbers()
    system = new.take(2)
    documents = [new.take(chance.randrange(2, 7)) for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    after: dict[tuple[int, int], Chain] = {}  # a document's blocks, by the block before and itself
    at = 0.0
    for number in range(count):
        if number % 500 == 0:
            chance.shuffle(documents)
        at += chance.expovariate(1.0)
        found = chance.choices(range(len(documents)), weights, k=4)
        chain = system
        for index in sorted(set(found)):
            place = (chain[-1], documents[index][0])
            if place not in after:
                after[place] = new.take(len(documents[index]))
            chain += after[place]
        yield at, chain + new.take(1)


def tools(chance: random.Random, count: int) -> Iterator[Event]:
    """Agents: tools answer after a second or after minutes, and some calls start helpers.

    A helper has the tools' description in common with its parent, and ends after a few calls.
    """
    new = Numbers()
    kinds = [new.take(chance.randrange(4, 12)) for _ in range(5)]
    left, start = count, 0.0
    while left > 0:
        start += chance.expovariate(0.05)
        kind = chance.choice(kinds)
        work = [(start, kind + new.take(2), int(chance.expovariate(0.04)) + 3)]
        while work and left > 0:
            at, chain, turns = work.pop()
            for _ in range(min(left, turns)):
                left -= 1
                yield at, chain
                if turns > 3 and chance.random() < 0.05:
                    work.append((at + 1.0, kind + new.take(3), 3))
                slow = chance.random() < 0.15
                at += chance.lognormvariate(5.0, 1.0) if slow else chance.expovariate(0.3)
                chain += new.take(chance.randrange(1, 4))


def batches(chance: random.Random, count: int) -> Iterator[Event]:
    """Evaluations: each question 8 times within a minute, after the task's examples; then the next.

    Every task is run again for another checkpoint, hours later, with the same prompts.
    """
    new = Numbers()
    tasks = [
        (examples, [new.take(chance.randrange(1, 4)) for _ in range(40)])
        for examples in (new.take(chance.randrange(3, 20)) for _ in range(6))
    ]
    at = 0.0
    for number in range(count):
        turn = number // 8
        examples, questions = tasks[turn // 40 % len(tasks)]
        yield at, examples + questions[turn % 40]
        at += chance.expovariate(0.2) if number % 8 else 20.0
        at += 3600.0 if number % (8 * 40) == 0 else 0.0


def templates(chance: random.Random, count: int) -> Iterator[Event]:
    """300 prompt templates with examples, of unequal popularity; behind them one new block."""
    new = Numbers()
    made = [new.take(chance.randrange(1, 16)) for _ in range(300)]
    weights = [(rank + 1) ** -0.8 for rank in range(len(made))]
    at = 0.0
    for _ in range(count):
        at += chance.expovariate(2.0)
        (template,) = chance.choices(made, weights)
        yield at, template + new.take(1)


def tenants(chance: random.Random, count: int) -> Iterator[Event]:
    """Chats of 100 tenants of unequal size (Zipf), each with a system prompt of its own."""
    new = Numbers()
    systems = [new.take(chance.randrange(1, 10)) for _ in range(100)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    left, start = count, 0.0
    while left > 0:
        start += chance.expovariate(0.3)
        (system,) = chance.choices(systems, weights)
        at, chain = start, system + new.take(chance.randrange(1, 5))
        for _ in range(min(left, int(chance.expovariate(0.4)) + 1)):
            left -= 1
            yield at, chain
            at += chance.lognormvariate(3.5, 1.2)
            chain += new.take(chance.randrange(1, 4))


Family = Callable[[random.Random, int], Iterator[Event]]
FAMILIES: tuple[Family, ...] = (
    oneshots,
    conversations,
    scans,
    uniform,
    popular,
    agents,
    drift,
    phases,
    eager,
    bursts,
    retrieval,
    tools,
    batches,
    templates,
    tenants,
)
