"""Reasoning in the text of a chat: what a model writes between ``<think>`` and ``</think>``. Pure.

The tags are those of Qwen3, DeepSeek-R1 and the models that were trained on these.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.structured import ReasoningStart
from kvrelay.text.stop import overlap

OPEN = "<think>"
CLOSE = "</think>"
MARKS = (OPEN, CLOSE)
TAIL_TOKENS = 16  # of a prompt, in which its template has opened the reasoning or left it out


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """New text of each kind."""

    reasoning: str
    content: str


def has_reasoning(template: str) -> bool:
    """Whether a chat template tells reasoning from content."""
    return any(mark in template for mark in MARKS)


def start_of(tail: str) -> ReasoningStart:
    """How an answer begins behind a prompt with this end."""
    shown = tail.rstrip()
    if shown.endswith(OPEN):
        return "open"
    return "" if shown.endswith(CLOSE) else "optional"


class ReasoningParser:
    """Push the text of an answer in pieces of any length, then ``flush`` once.

    All parts so far follow from the text so far, however it was cut, so a resumed stream continues.
    Blanks around the reasoning belong to neither part.
    """

    def __init__(self, start: ReasoningStart) -> None:
        self._held = ""  # not decided yet
        self._step = {"": self._content, "optional": self._start, "open": self._blank}[start]

    def push(self, text: str) -> ReasoningPart:
        """The reasoning and the content that this text adds."""
        self._held += text
        reasoning, content = "", ""
        step = None
        while self._held and step != self._step:
            step = self._step
            part = step()
            reasoning += part.reasoning
            content += part.content
        return ReasoningPart(reasoning, content)

    def flush(self) -> ReasoningPart:
        """The rest, at the end of the answer."""
        rest = self._held
        self._held = ""
        if self._step in (self._start, self._content):
            return ReasoningPart("", rest)
        return ReasoningPart(rest.rstrip() if self._step == self._reasoning else "", "")

    def _start(self) -> ReasoningPart:
        """Whether the answer begins with the tag."""
        body = self._held.lstrip()
        if body.startswith(OPEN):
            self._held = body.removeprefix(OPEN)
            self._step = self._blank
        elif not OPEN.startswith(body):
            self._step = self._content
        return NOTHING

    def _blank(self) -> ReasoningPart:
        """Before the first character of the reasoning."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._reasoning
        return NOTHING

    def _reasoning(self) -> ReasoningPart:
        """Up to the closing tag; blanks are held until it is known that they are inside."""
        held = self._held
        end = held.find(CLOSE)
        if end >= 0:
            self._held = held[end + len(CLOSE) :]
            self._step = self._gap
            return ReasoningPart(held[:end].rstrip(), "")
        shown = held[: len(held) - overlap(held, CLOSE)].rstrip()
        self._held = held[len(shown) :]
        return ReasoningPart(shown, "")

    def _gap(self) -> ReasoningPart:
        """Behind the closing tag."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._content
        return NOTHING

    def _content(self) -> ReasoningPart:
        held = self._held
        self._held = ""
        return ReasoningPart("", held)


NOTHING = ReasoningPart("", "")
