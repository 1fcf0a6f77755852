"""Documents of stated facts, and questions that one fact answers.

Pure and seeded: the same seed gives the same text on every machine. An answer is a whole
sentence that ends in the word asked for, so recall happens during decode, not in prefill.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from kvrelay.recall.words import ADJECTIVES, ASIDES, NAMES, NOUNS, PLACES, TITLES, YEARS

TOKENS_PER_FACT: Final = 8.44
"""Measured mean over documents; `facts_for` divides by it."""

PARAGRAPH: Final = 6
ASIDE_RATE: Final = 0.06


class FactKind(StrEnum):
    """The property that a fact states."""

    OWNER = "owner"
    PLACE = "place"
    YEAR = "year"


@dataclass(frozen=True, slots=True)
class Wording:
    """How one kind is stated, asked and answered; `stated[0]` is also the answer's wording."""

    values: tuple[str, ...]
    stated: tuple[str, ...]
    asked: tuple[str, ...]


WORDINGS: Final[dict[FactKind, Wording]] = {
    FactKind.OWNER: Wording(
        NAMES,
        ("belongs to", "was left to", "was sold to"),
        ("Who owns the {}?", "Who is the owner of the {}?"),
    ),
    FactKind.PLACE: Wording(
        PLACES,
        ("is kept in", "stands in", "can be seen in"),
        ("Where is the {}?", "Where can I find the {}?"),
    ),
    FactKind.YEAR: Wording(
        YEARS,
        ("was made around", "dates from around"),
        ("When was the {} made?", "How old is the {}?"),
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement: `subject` ("silver lantern") has `value` ("Mira") as its `kind`."""

    kind: FactKind
    subject: str
    value: str

    def sentence(self, form: int = 0) -> str:
        """The statement in one of the wordings of its kind, taken modulo their number."""
        stated = WORDINGS[self.kind].stated
        return f"The {self.subject} {stated[form % len(stated)]} {self.value}."


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the facts it states, in the order of the text."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """A question and the exact text that answers it; `value` is the part that must be recalled."""

    text: str
    answer: str
    value: str


def facts_for(tokens: int) -> int:
    """How many facts make a document of about `tokens` tokens."""
    return max(1, round(tokens / TOKENS_PER_FACT))


def document(seed: int, facts: int = 118) -> Document:
    """The document of this seed; no subject is given two values of one kind.

    Raises:
        ValueError: `facts` is not in 1..3072, the number of distinct facts.
    """
    limit = len(FactKind) * len(ADJECTIVES) * len(NOUNS)
    if not 1 <= facts <= limit:
        raise ValueError(f"facts must be in 1..{limit}, not {facts}")
    random = Random(f"kvrelay.recall {seed} {facts}")
    stated = tuple(_fact(random, key) for key in random.sample(range(limit), facts))
    return Document("\n".join(_lines(random, stated)), stated)


def question(fact: Fact, form: int = 0) -> FactQuestion:
    """The question that `fact` answers, in one of the wordings, taken modulo their number."""
    asked = WORDINGS[fact.kind].asked
    text = asked[form % len(asked)].format(fact.subject)
    return FactQuestion(text, fact.sentence(), fact.value)


def _fact(random: Random, key: int) -> Fact:
    rest, noun = divmod(key, len(NOUNS))
    kind, adjective = divmod(rest, len(ADJECTIVES))
    chosen = tuple(FactKind)[kind]
    subject = f"{ADJECTIVES[adjective]} {NOUNS[noun]}"
    return Fact(chosen, subject, random.choice(WORDINGS[chosen].values))


def _lines(random: Random, facts: tuple[Fact, ...]) -> Iterator[str]:
    yield random.choice(TITLES)
    for start in range(0, len(facts), PARAGRAPH):
        yield " ".join(_sentences(random, facts[start : start + PARAGRAPH]))


def _sentences(random: Random, facts: tuple[Fact, ...]) -> Iterator[str]:
    for fact in facts:
        yield fact.sentence(random.randrange(6))
        if random.random() < ASIDE_RATE:
            yield random.choice(ASIDES)
