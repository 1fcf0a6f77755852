"""Streamed text on the screen."""

from __future__ import annotations

import pytest

from kvrelay.cli.demo.flow import WIDTH, WrappedOutput


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["The", None, " mask", " was"], "   The [kill] mask was\n"),
        ([None, "The", " mask"], "   [kill] The mask\n"),
        (["The cop", None, "per", " mask"], "   The cop [kill] per mask\n"),
    ],
)
def test_a_note_stands_apart(
    parts: list[str | None], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = WrappedOutput()
    for part in parts:
        flow.write(*((" [kill]", "red") if part is None else (part,)))
    flow.end()
    assert capsys.readouterr().out == shown


def test_lines_are_wrapped_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    flow = WrappedOutput()
    for _ in range(40):
        flow.write(" word")
    flow.end("right")
    *_, last = lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines).split() == [*["word"] * 40, "right"]
    assert max(map(len, lines)) <= WIDTH == len(last)
