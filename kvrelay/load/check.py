"""Every token checked: answers to one request are equal, and equal to the reference's.

The first answer to a request is kept. Later answers to it are compared when they end, and the first
ones with the reference after the load, when it disturbs nothing. Usages are checked too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.load.request import LoadAnswer, LoadRequest

MOST_KEPT = 64 << 20  # tokens or characters of all kept answers
MOST_SHOWN = 20
NEAR = 3  # tokens shown behind the first that differs


@dataclass(slots=True)
class KeptAnswer:
    """The longest answer to a request so far. ``whole``: it was received to its end.

    ``checks``: how often it was found equal to another answer.
    """

    request: LoadRequest
    ids: array[int] | None
    text: str
    whole: bool
    finish: str | None
    checks: int = 0

    @classmethod
    def of(cls, answer: LoadAnswer) -> KeptAnswer:
        ids = None if answer.ids is None else array("Q", answer.ids)
        text = answer.text if ids is None else ""
        return cls(answer.request, ids, text, answer.ended == "done", answer.finish)

    def exceeds(self, other: KeptAnswer) -> bool:
        """Whether it has more of the answer."""
        return not other.whole and (self.whole or self.size() > other.size())

    def size(self) -> int:
        return len(self.text) if self.ids is None else len(self.ids)


@dataclass(slots=True)
class AnswerCheck:
    """All kept answers and what was found wrong with others. ``reference`` names the reference.

    ``mismatches``, ``unanswered`` (by the reference) and ``faults`` (wrong usages) count; the first
    few are described in ``shown``.
    """

    reference: str | None = None
    compared: int = 0
    verified: int = 0
    unkept: int = 0  # answers beyond the bound of memory
    mismatches: int = 0
    unanswered: int = 0
    usages: int = 0
    faults: int = 0
    shown: list[str] = field(default_factory=list)
    _kept: dict[bytes, KeptAnswer] = field(default_factory=dict)
    _size: int = 0

    @property
    def failed(self) -> bool:
        """Whether anything was wrong, or could not be compared for want of the reference."""
        return bool(self.mismatches or self.unanswered or self.faults)

    def take(self, answer: LoadAnswer, ids_sent: bool) -> None:
        """An answer under load, or a part of one; ``ids_sent``: the prompt was token ids."""
        if answer.ended == "done":
            self.usages += 1
            faults = list(usage_faults(answer, ids_sent))
            self.faults += bool(faults)
            for fault in faults:
                self._show(f"usage of {_name(answer.request)}: {fault}")
        if self.reference is None or (not answer.tokens and answer.ended != "done"):
            return
        given, key = KeptAnswer.of(answer), answer.request.key()
        known = self._kept.get(key)
        if known is None:
            if self._size + given.size() > MOST_KEPT:
                self.unkept += 1
                return
            self._kept[key] = given
            self._size += given.size()
        elif self._compare(known, given, "the first answer") and given.exceeds(known):
            self._kept[key] = given
            self._size += given.size() - known.size()

    def pending(self, every: bool) -> Iterator[LoadRequest]:
        """Requests whose answer the reference must still give: those never compared, or all."""
        for kept in list(self._kept.values()):
            if every or not kept.checks:
                yield kept.request

    def verify(self, answer: LoadAnswer) -> None:
        """Compare the kept answer with the reference's."""
        if answer.ended != "done":
            self.unanswered += 1
            ending = f"the reference gave no answer: {answer.error or answer.ended}"
            self._show(f"{_name(answer.request)}: {ending}")
            return
        self.verified += 1
        self._compare(KeptAnswer.of(answer), self._kept[answer.request.key()], "the reference")

    def _compare(self, wanted: KeptAnswer, given: KeptAnswer, what: str) -> bool:
        self.compared += 1
        found = difference(wanted, given, what)
        if found is None:
            wanted.checks += 1
            given.checks += 1
            return True
        self.mismatches += 1
        self._show(f"{_name(given.request)}: {found}")
        return False

    def _show(self, line: str) -> None:
        if len(self.shown) < MOST_SHOWN:
            self.shown.append(line)


def difference(wanted: KeptAnswer, given: KeptAnswer, what: str) -> str | None:
    """Where an answer differs from another one; a part may be the beginning of the whole."""
    if wanted.ids is None or given.ids is None:
        unit, one, other = "character", _text(wanted), _text(given)
        if one is None or other is None:
            return f"token ids on one side only: {what} cannot be compared"
        at = _first_difference(one, other)
        shown = repr(other[at : at + 12]), repr(one[at : at + 12])
    else:
        unit, at = "token", _first_difference(wanted.ids, given.ids)
        ends = slice(at, at + NEAR)
        shown = str(given.ids[ends].tolist()), str(wanted.ids[ends].tolist())
    if at < min(wanted.size(), given.size()):
        return f"{unit} {at}: here {shown[0]}.., {what} {shown[1]}.."
    short, long = sorted((wanted, given), key=KeptAnswer.size)
    if short.whole and long.size() > short.size():
        sizes = given.size(), wanted.size()
        return f"{unit} {at}: here {sizes[0]} {unit}s, {what} has {sizes[1]}"
    if wanted.whole and given.whole and wanted.finish != given.finish:
        return f"finish reason {given.finish!r} here, {what} has {wanted.finish!r}"
    return None


def _first_difference(one: array[int] | str, other: array[int] | str) -> int:
    """The length of the shorter one if it is the beginning of the longer one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _text(kept: KeptAnswer) -> str | None:
    return kept.text if kept.ids is None else None


def _name(request: LoadRequest) -> str:
    turn = f" turn {request.turn}" if request.turn else ""
    return f"request {request.number}{turn} (seed {request.seed})"


def usage_faults(answer: LoadAnswer, ids_sent: bool) -> Iterator[str]:
    """What is wrong with the usage of an answer that is done."""
    account, most = answer.account, answer.request.max_tokens
    if account is None:
        yield "it is missing"
        return
    prompt, completion = account.prompt_tokens, account.completion_tokens
    ids = answer.request.ids()
    if answer.ids is not None and completion != len(answer.ids):
        yield f"completion_tokens is {completion}, and {len(answer.ids)} tokens came"
    if ids_sent and ids is not None and prompt != len(ids):
        yield f"prompt_tokens is {prompt}, and the prompt has {len(ids)}"
    if account.total_tokens is not None and account.total_tokens != prompt + completion:
        yield f"total_tokens is {account.total_tokens}, not {prompt} + {completion}"
    if account.sources and sum(account.sources.values()) != prompt:
        yield f"the sources {dict(account.sources)} do not add up to {prompt} prompt tokens"
    if any(count < 0 for count in account.sources.values()):
        yield f"a source is negative: {dict(account.sources)}"
    yield from account.faults
    if completion > most or (answer.finish == "length" and completion != most):
        yield f"completion_tokens is {completion}, {answer.finish} at max_tokens {most}"
