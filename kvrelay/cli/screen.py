"""Terminal output of commands: colour only on a terminal, tables, lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}


def coloured(stream: TextIO) -> bool:
    """Whether to use colour: on a terminal, unless ``NO_COLOR`` is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style; plain if the stream is no terminal."""
    if not text or not coloured(stream or sys.stdout):
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int]) -> str:
    """Columns as wide as their content; those in ``right`` are right-aligned."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join([paint(line(head), "bold"), *(line(row) for row in rows)])


def print_out(text: str = "") -> None:
    """One line to standard output, flushed."""
    print(text, flush=True)


def print_err(text: str) -> None:
    """One line to standard error, flushed."""
    print(text, file=sys.stderr, flush=True)
