"""``kvrelay store COMMAND``: one file a command, each named here."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cli import commands
from kvrelay.cli.commands import Command
from kvrelay.cli.screen import say, tell

PROG = "kvrelay store"
COMMANDS = (
    Command("simulate", "kvrelay.cli.store_simulate", "replay a trace through eviction policies"),
)


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        say(commands.usage(
            PROG, "Looks into the store of KV blocks.", COMMANDS,
            f"{PROG} COMMAND --help says more.",
        ))  # fmt: skip
        return 0 if words else 2
    command = commands.find(PROG, COMMANDS, words[0])
    if isinstance(command, str):
        tell(command)
        return 2
    return command.run(words[1:])
