"""A word on the command line, and the list of those there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvrelay.cli.screen import paint
from kvrelay.installation import require
from kvrelay.process import sigint


@dataclass(frozen=True, slots=True)
class Command:
    """A command, the module that holds its ``main``, and the extras that this needs."""

    name: str
    module: str
    summary: str
    extras: tuple[str, ...] = ()

    def load(self) -> Callable[[Sequence[str]], int]:
        """Its ``main``; ``NotInstalled`` if a package of its extras is missing."""
        require(*self.extras)
        with sigint.sigint_exits():
            main: Callable[[Sequence[str]], int] = import_module(self.module).main
        return main


def usage(prog: str, purpose: str, commands: Sequence[Command], closing: str) -> str:
    """The page of ``--help``."""
    lines = [
        f"usage: {prog} COMMAND [options]",
        "",
        purpose,
        "",
        paint("commands:", "bold"),
        *(f"  {command.name:<12}{command.summary}" for command in commands),
        "",
        closing,
    ]
    return "\n".join(lines)


def find(prog: str, commands: Sequence[Command], word: str) -> Command | str:
    """The command, or what to say when there is none of this name."""
    for command in commands:
        if command.name == word:
            return command
    names = [command.name for command in commands]
    close = difflib.get_close_matches(word, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"{prog}: no command {word!r}; {hint}"
