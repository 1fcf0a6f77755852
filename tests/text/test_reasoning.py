"""Reasoning: the same from any pieces of the text, and what a prompt says about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.structured import ReasoningStart
from kvrelay.text.reasoning import ReasoningParser, has_reasoning, start_of


def read(start: ReasoningStart, pieces: list[str]) -> tuple[str, str]:
    """The reasoning and the content."""
    parser = ReasoningParser(start)
    parts = [*map(parser.push, pieces), parser.flush()]
    return "".join(one.reasoning for one in parts), "".join(one.content for one in parts)


CASES: list[tuple[ReasoningStart, str, str, str]] = [
    ("", "<think>a</think>b", "", "<think>a</think>b"),
    ("optional", "<think>\nWell, é.\n</think>\n\nYes.\n", "Well, é.", "Yes.\n"),
    ("optional", "\n<think>a\n\nb</think>c", "a\n\nb", "c"),
    ("optional", "<think>\n\n</think>\n\nYes", "", "Yes"),
    ("optional", "<thinking>a</think>", "", "<thinking>a</think>"),
    ("optional", " plain </think>", "", " plain </think>"),
    ("optional", "<thi", "", "<thi"),
    ("optional", " \n", "", " \n"),
    ("optional", "<think>never ends </thin", "never ends </thin", ""),
    ("optional", "<think>a</think>", "a", ""),
    ("open", "\na < b </ </thin> \n</think>\n{}", "a < b </ </thin>", "{}"),
    ("open", "a</think>b</think>c", "a", "b</think>c"),
    ("open", "cut \n", "cut", ""),
    ("open", "", "", ""),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_each_cut_gives_the_same(
    start: ReasoningStart, text: str, reasoning: str, content: str
) -> None:
    assert read(start, [text]) == (reasoning, content)
    assert read(start, list(text)) == (reasoning, content)
    for cut in range(len(text)):
        assert read(start, [text[:cut], text[cut:]]) == (reasoning, content), cut


@settings(max_examples=300, deadline=None)
@given(
    start=st.sampled_from(["", "optional", "open"]),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "</thi", "nk>", " ", "\n", "a", "<"])),
)
def test_what_is_shown_never_depends_on_the_cuts(start: ReasoningStart, pieces: list[str]) -> None:
    """A resumed stream replays its text in one piece and goes on."""
    whole = ReasoningParser(start)
    once = whole.push("".join(pieces))
    parts = list(map(ReasoningParser(start).push, pieces))
    assert once.reasoning == "".join(one.reasoning for one in parts)
    assert once.content == "".join(one.content for one in parts)


@pytest.mark.parametrize(
    ("tail", "start"),
    [
        ("<|im_start|>assistant\n", "optional"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|Assistant|><think>\n", "open"),
        ("say <think><|im_end|>\n<|im_start|>assistant\n", "optional"),
        ("", "optional"),
    ],
)
def test_prompts(tail: str, start: ReasoningStart) -> None:
    assert start_of(tail) == start


def test_templates() -> None:
    assert has_reasoning("{% if '</think>' in content %}{% endif %}")
    assert has_reasoning("{{ messages[0].content }}<think>")
    assert not has_reasoning("{{ content }}")
