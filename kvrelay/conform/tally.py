"""The verdict of one check: answers compared, differences, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from kvrelay.errors import KvrelayError
from kvrelay.load.request import LoadAnswer

MOST_SHOWN = 10


class ConformOutcome(StrEnum):
    """``MISSING``: the server lacks what the check needs. ``UNTRIED``: the user left it out.

    ``FAILED``: the server did not answer.
    """

    EXACT = "exact"
    DIFFERS = "differs"
    MISSING = "not supported"
    UNTRIED = "not tried"
    FAILED = "no verdict"


class NotSupported(KvrelayError):
    """The server cannot do what a check needs, or the situation never came about."""


class NotTried(NotSupported):
    """The user left out what a check needs."""


class Unanswered(KvrelayError):
    """The server did not answer a request of a check."""


@dataclass(slots=True)
class Tally:
    """What one check found with one kind of sampling.

    ``untold``: pairs of answers without text and token ids. ``gap``: the largest difference of log
    probabilities of equal tokens. ``reason``: why it is not supported, or not ``tried``; ``error``:
    why there is no verdict. ``notes``: what else a reader should know.
    """

    compared: int = 0
    differing: int = 0
    untold: int = 0
    gap: float = 0.0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str | None = None
    tried: bool = True
    error: str | None = None

    @property
    def outcome(self) -> ConformOutcome:
        """A difference that was found stands, whatever happened afterwards."""
        if self.differing:
            return ConformOutcome.DIFFERS
        if self.error is not None:
            return ConformOutcome.FAILED
        if not self.tried:
            return ConformOutcome.UNTRIED
        return (
            ConformOutcome.MISSING
            if self.why_missing is not None or not self.compared
            else ConformOutcome.EXACT
        )

    @property
    def why_missing(self) -> str | None:
        """Why the check is not supported, or was not tried."""
        if self.reason is None and self.untold and not self.compared:
            return f"no answer had text or token ids ({self.untold:,} pairs)"
        return self.reason

    def expect(self, fault: str | None) -> None:
        """One comparison; ``fault`` says what is wrong."""
        self.compared += 1
        if fault is not None:
            self.differing += 1
            if len(self.differences) < MOST_SHOWN:
                self.differences.append(fault)

    def compare(self, where: str, wanted: LoadAnswer, given: LoadAnswer, skip: int = 0) -> bool:
        """Whether an answer is ``wanted``, behind its first ``skip`` tokens.

        An answer that was not received to its end must be the beginning of the wanted one. Answers
        without text and token ids could stand for any tokens: they are counted, not compared.
        """
        if is_untold(given) and (is_untold(wanted) or given.ended != "done"):
            self.untold += 1
            return True
        fault = difference(wanted, given, skip)
        self.expect(None if fault is None else f"{where}: {fault}")
        for (_, one), (_, other) in _equal(_tokens(wanted)[skip:], _tokens(given)):
            if one is not None and other is not None:
                self.gap = max(self.gap, abs(one - other))
        return fault is None


def is_untold(answer: LoadAnswer) -> bool:
    """Whether an answer has neither text nor token ids: it may be empty, or special tokens only."""
    return not answer.text and not _tokens(answer)


def difference(wanted: LoadAnswer, given: LoadAnswer, skip: int = 0) -> str | None:
    """Where an answer differs from the wanted one, each with its log probability."""
    unit, ones, others = "token", _tokens(wanted)[skip:], _tokens(given)
    texts_only = not (ones or others)
    if texts_only or (wanted.text and given.text and not (ones and others)):
        unit = "character"
        ones, others = [(c, None) for c in wanted.text], [(c, None) for c in given.text]
    at = len(_equal(ones, others))
    if at < min(len(ones), len(others)):
        return f"{unit} {skip + at}: here {_shown(others[at])}, alone {_shown(ones[at])}"
    if len(others) > len(ones) or (given.ended == "done" and len(others) < len(ones)):
        return f"{unit} {skip + at}: here {len(others)} {unit}s, alone {len(ones)}"
    if given.ended == wanted.ended == "done" and given.finish != wanted.finish:
        return f"finish reason {given.finish!r} here, {wanted.finish!r} alone"
    return None


Token = tuple[int | str, float | None]


def _tokens(answer: LoadAnswer) -> Sequence[Token]:
    """Token ids, else the texts that came with log probabilities, else nothing."""
    chances = [one.logprob for one in answer.chosen]
    if not answer.ids and any(one.text for one in answer.chosen):
        return [(one.text, one.logprob) for one in answer.chosen]
    if answer.ids is None:
        return []
    chances += [None] * (len(answer.ids) - len(chances))
    return list(zip(answer.ids, chances, strict=False))


def _equal(ones: Sequence[Token], others: Sequence[Token]) -> list[tuple[Token, Token]]:
    pairs = zip(ones, others, strict=False)
    return list(takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))


def _shown(token: Token) -> str:
    name, chance = token
    return f"{name!r}" if chance is None else f"{name!r} ({chance:.6g})"
