"""The commands of a program: found by name, loaded on use, listed by ``--help``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvrelay.cli.screen import paint, print_err, print_out
from kvrelay.errors import NotInstalled
from kvrelay.installation import asks_help, clone_root, require, short_page
from kvrelay.process import sigint


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module of its ``main``, and the extras that this module needs."""

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


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """The commands of one program, such as ``kvrelay`` or ``kvrelay store``."""

    prog: str
    purpose: str
    commands: tuple[Command, ...]
    closing: str

    def page(self) -> str:
        """The page of ``--help``."""
        lines = [
            f"usage: {self.prog} COMMAND [options]",
            "",
            self.purpose,
            "",
            paint("commands:", "bold"),
            *(f"  {command.name:<12}{command.summary}" for command in self.commands),
            "",
            self.closing,
        ]
        return "\n".join(lines)

    def find(self, argv: Sequence[str]) -> Command | int:
        """The command that ``argv`` begins with.

        Without one, the exit status after printing the page or what is wrong.
        """
        if not argv or argv[0] in ("-h", "--help", "help"):
            print_out(self.page())
            return 0 if argv else 2
        for command in self.commands:
            if command.name == argv[0]:
                return command
        names = [command.name for command in self.commands]
        close = difflib.get_close_matches(argv[0], names, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        print_err(f"{self.prog}: no command {argv[0]!r}; {hint}")
        return 2

    def run(self, command: Command, argv: Sequence[str]) -> int:
        """Run a command of this group, or print its page if only a short one is possible."""
        if asks_help(argv):
            try:
                require(*command.extras)
            except NotInstalled as error:
                print_out(short_page(f"{self.prog} {command.name}", command.summary, error))
                return 0
        return command.load()(argv)
