"""Streamed text, wrapped between words and indented."""

from __future__ import annotations

import re
import sys
import threading

from kvrelay.cli.screen import paint

WIDTH, INDENT = 78, 3


class WrappedOutput:
    """Writes to standard output; nothing if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._column = 0
        self._noted = False  # the last text was a note, in a style of its own
        self._lock = threading.RLock()  # notes come from another thread

    def write(self, text: str, style: str | None = None) -> None:
        """Write more text; a word begins with a space."""
        if self._quiet:
            return
        with self._lock:
            if self._noted and style is None and text[:1].strip():
                text = f" {text}"
            self._noted = style is not None
            for part in re.split(r"(\n|(?= ))", text) if style is None else [text]:
                if part == "\n" or (part[:1] == " " and self._column + len(part) > WIDTH):
                    self.end()
                    part = part.strip()
                if part:
                    self._put(part, style)
            sys.stdout.flush()

    def end(self, verdict: str = "", style: str = "dim") -> None:
        """End the current line, if there is one, with the verdict at its right end."""
        with self._lock:
            if self._column and not self._quiet:
                room = max(2, WIDTH - self._column - len(verdict)) if verdict else 0
                sys.stdout.write(" " * room + paint(verdict, style) + "\n")
            self._column = 0

    def _put(self, part: str, style: str | None) -> None:
        if self._column == 0:
            sys.stdout.write(" " * INDENT)
            self._column = INDENT
            part = part.lstrip(" ")
        sys.stdout.write(part if style is None else paint(part, style))
        self._column += len(part)
