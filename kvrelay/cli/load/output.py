"""What ``kvrelay load`` and ``kvrelay conform`` share: a line of progress, files, options."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.cli.screen import coloured, paint, print_err
from kvrelay.config.reader import options
from kvrelay.errors import Rejected

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH = 80
CLEAR = "\r\x1b[K"


class LiveLine:
    """A line of standard error that is written over; ``live`` if that is a terminal."""

    def __init__(self, progress: bool) -> None:
        self.progress = progress
        self.live = coloured(sys.stderr)

    def show(self, text: str) -> None:
        if self.progress and self.live:
            sys.stderr.write(CLEAR + text[: WIDTH - 1])
            sys.stderr.flush()
        elif self.progress:
            print_err(text)

    def clear(self) -> None:
        if self.progress and self.live:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()


def wrapped(text: str, style: str = "", indent: str = "") -> Iterator[str]:
    """Lines of at most ``WIDTH`` characters."""
    for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent="  "):
        yield paint(line, style) if style else line


def claim(json: str | None, html: str | None, csv: str | None = None) -> None:
    """Raises ``Rejected`` for a file that cannot be written, before the run."""
    claimed: dict[Path, str] = {}
    for field, path in (("json", json), ("html", html), ("csv", csv)):
        try:
            if path is not None:
                Path(path).open("a").close()
                other = claimed.setdefault(Path(path).resolve(), field)
                if other != field and Path(path).is_file():
                    raise Rejected(field, f"{path} is the file of --{other} too")
        except OSError as error:
            raise Rejected(field, f"cannot write {path}: {error.strerror}") from None


def write(path: str | None, text: str) -> None:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")


def as_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=1) + "\n"


def given(config: DataclassInstance) -> dict[str, object]:
    """The options of a command, without secrets and what is off."""
    shown = (item for item in options(type(config)) if not item.rules.secret)
    values = {item.name: getattr(config, item.name) for item in shown}
    return {name: value for name, value in values.items() if value not in (None, (), "", False)}
