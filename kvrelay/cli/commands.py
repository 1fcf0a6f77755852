"""The commands of a program: found by name, loaded on use, listed by ``--help``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvrelay.cli.screen import paint, print_out
from kvrelay.errors import NotInstalled
from kvrelay.installation import asks_help, clone_root, require, short_page
from kvrelay.process import sigint


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module that holds its ``main``, and the extras that this module needs."""

    name: str
    module: str
    summary: str
    extras: tuple[str, ...] = ()

    def load(self) -> Callable[[Sequence[str]], int]:
        """Its ``main``; ``NotInstalled`` if a package is missing, or the benchmarks are."""
        if self.module.startswith("benchmarks.") and clone_root() is None:
            raise NotInstalled(
                f"the code of {self.name!r} is not in the wheel: clone kvrelay's repository,"
                " run `make venv` there, then use its .venv/bin/kvrelay"
            )
        require(*self.extras)
        with sigint.sigint_exits():
            main: Callable[[Sequence[str]], int] = import_module(self.module).main
        return main

    def help_without(self, prog: str, argv: Sequence[str]) -> bool:
        """Whether ``argv`` asks for help that only a short page can give; prints that page."""
        if not asks_help(argv):
            return False
        try:
            require(*self.extras)
        except NotInstalled as error:
            print_out(short_page(f"{prog} {self.name}", self.summary, error))
            return True
        return False


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
    """The command of this name, or the error message if there is none."""
    for command in commands:
        if command.name == word:
            return command
    names = [command.name for command in commands]
    close = difflib.get_close_matches(word, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"{prog}: no command {word!r}; {hint}"
