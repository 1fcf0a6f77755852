"""The demonstration: questions over one long document, and the cost of each on each worker.

The document's tokens are the prefix of every prompt, so only the first question should have to
compute them. An answer is right or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvrelay.client.client import Client
from kvrelay.recall.facts import Document, FactQuestion, document, question
from kvrelay.recall.prompt import prompt
from kvrelay.usage import Usage

MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DemoLeg:
    """What one worker did for a request: ``length = local + external + computed``."""

    worker: str
    role: str
    length: int
    local: int
    external: int
    computed: int
    recomputed: int
    failed: int
    lost: bool  # the worker died; the figures are those of its admission


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question, its answer and cost. Times are those of the client, in seconds."""

    question: str
    expected: str
    answer: str
    hops: tuple[DemoLeg, ...]
    first_token: float
    token_gap: float
    tokens: int

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.expected

    @property
    def source(self) -> str:
        """Where most of the prompt came from: ``cold`` (computed), ``local`` or ``store``."""
        first = next(hop for hop in self.hops if not hop.lost)
        kinds = {"cold": first.computed, "local": first.local, "store": first.external}
        return max(kinds, key=lambda kind: kinds[kind])


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The document and the questions of one demonstration."""

    document: Document
    questions: tuple[FactQuestion, ...]

    @classmethod
    def draw(cls, seed: int, facts: int, count: int) -> DemoPlan:
        """Questions spread evenly from the document's first fact to its last."""
        made = document(seed, facts)
        last = len(made.facts) - 1
        places = [round(i * last / max(1, count - 1)) for i in range(count)]
        # Not in the order of the text, which a reader does not know.
        mixed = places[::2] + places[1::2][::-1]
        chosen = (question(made.facts[at], form) for form, at in enumerate(mixed))
        return cls(made, tuple(chosen))

    def prompt(self, asked: FactQuestion) -> str:
        return prompt(self.document, asked)


def ask(
    client: Client,
    plan: DemoPlan,
    asked: FactQuestion,
    names: Mapping[str, str],
    on_text: Callable[[str], None],
) -> AnsweredQuestion:
    """Ask one question greedily; ``on_text`` gets the text as it streams."""
    start = time.perf_counter()
    stamps: list[float] = []
    text = ""
    hops: tuple[DemoLeg, ...] = ()
    for chunk in client.generate(prompt=plan.prompt(asked), max_tokens=MAX_TOKENS, temperature=0.0):
        stamps += [time.perf_counter()] * len(chunk.token_ids)
        text += chunk.text
        on_text(chunk.text)
        if chunk.usage is not None:
            hops = tuple(hops_of(chunk.usage, names))
    gaps = len(stamps) - 1
    return AnsweredQuestion(
        question=asked.text,
        expected=asked.answer,
        answer=text,
        hops=hops,
        first_token=stamps[0] - start,
        token_gap=(stamps[-1] - stamps[0]) / gaps if gaps else 0.0,
        tokens=len(stamps),
    )


def hops_of(usage: Usage, names: Mapping[str, str]) -> Iterator[DemoLeg]:
    """Every leg of a request, with the names of its workers by their addresses."""
    for leg in usage.legs:
        yield DemoLeg(
            worker=names.get(leg.address, leg.address),
            role=leg.role,
            length=leg.length,
            local=leg.local,
            external=leg.external,
            computed=leg.computed,
            recomputed=leg.recomputed,
            failed=leg.failed,
            lost=leg.lost,
        )


def describe(hop: DemoLeg) -> str:
    """One leg in a line; the numbers add up by construction."""
    if hop.lost:
        return f"{hop.worker:<10} died; another worker took over"
    outside = "from the store" if hop.role == "prefill" else "transferred"
    line = (
        f"{hop.worker:<10} {hop.length:>5} tokens = {hop.local:>4} local"
        f" + {hop.external:>4} {outside:<14} + {hop.computed:>4} computed"
    )
    extra = [f"{hop.recomputed} recomputed"] if hop.recomputed else []
    extra += [f"{hop.failed} failed to load"] if hop.failed else []
    return ", ".join([line, *extra])
