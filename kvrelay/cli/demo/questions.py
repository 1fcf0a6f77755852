"""Questions over one long document, their timed answers, and the account of each worker.

The document's tokens are the prefix of every prompt, so only the first question should have to
compute them. An answer is right or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvrelay.cli.demo.flow import WrappedOutput
from kvrelay.client.client import Stream
from kvrelay.recall.facts import Document, FactQuestion, document, question
from kvrelay.recall.prompt import prompt
from kvrelay.usage import LegUsage

FIGURES = ("role", "length", "local", "external", "computed", "recomputed", "failed", "lost")


@dataclass(slots=True)
class TimedAnswer:
    """An answer and its legs. Times in seconds; moments are those of ``time.perf_counter``."""

    asked: float = field(default_factory=time.perf_counter)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # of each token
    legs: tuple[LegUsage, ...] = ()

    @property
    def first_token(self) -> float:
        return self.arrivals[0] - self.asked

    @property
    def gap(self) -> float:
        """Mean time between two tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)

    def pause(self, since: float) -> float:
        """The longest pause after a moment."""
        moments = [since, *(at for at in self.arrivals if at > since)]
        return max((b - a for a, b in pairwise(moments)), default=0.0)

    @property
    def first_leg(self) -> LegUsage:
        """The first one that was not lost."""
        return next(leg for leg in self.legs if not leg.lost)

    @property
    def lost(self) -> bool:
        """Whether a worker died while it served the request."""
        return any(leg.lost for leg in self.legs)

    @property
    def source(self) -> str:
        """Where most of the prompt came from: ``cold`` (computed), ``local`` or ``store``."""
        leg = self.first_leg
        kinds = {"cold": leg.computed, "local": leg.local, "store": leg.external}
        return max(kinds, key=lambda kind: kinds[kind])


def read_answer(
    stream: Stream,
    flow: WrappedOutput,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> TimedAnswer:
    """Read an answer that was just asked for: its text goes to ``flow``.

    ``on_tokens`` gets the number of tokens so far.
    """
    answer = TimedAnswer()
    for chunk in stream:
        answer.tokens += chunk.token_ids
        answer.arrivals += [time.perf_counter()] * len(chunk.token_ids)
        answer.text += chunk.text
        flow.write(chunk.text)
        if chunk.usage is not None:
            answer.legs = chunk.usage.legs
        on_tokens(len(answer.tokens))
    return answer


def describe(leg: LegUsage, worker: str) -> str:
    """One leg in a line; the numbers add up by construction."""
    if leg.lost:
        return f"{worker:<10} was lost; another worker took over"
    outside = "from the store" if leg.role == "prefill" else "transferred"
    line = (
        f"{worker:<10} {leg.length:>5} tokens = {leg.local:>4} local"
        f" + {leg.external:>4} {outside:<14} + {leg.computed:>4} computed"
    )
    extra = [f"{leg.recomputed} recomputed"] if leg.recomputed else []
    extra += [f"{leg.failed} failed to load"] if leg.failed else []
    return ", ".join([line, *extra])


def legs_json(answer: TimedAnswer, names: Mapping[str, str]) -> list[dict[str, object]]:
    """The figures of every leg; ``length = local + external + computed``."""
    return [
        {"worker": names[leg.address], **{name: getattr(leg, name) for name in FIGURES}}
        for leg in answer.legs
    ]


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


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question of the plan and its answer."""

    question: FactQuestion
    answer: TimedAnswer

    @property
    def right(self) -> bool:
        return self.answer.text.strip() == self.question.answer
