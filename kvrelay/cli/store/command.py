"""``kvrelay store COMMAND``: the table of its commands, one module each."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cli import commands
from kvrelay.cli.commands import Command
from kvrelay.cli.screen import print_err, print_out

PROG = "kvrelay store"
COMMANDS = (
    Command("stats", "kvrelay.cli.store.stats", "what a store holds and has done", ("store",)),
    Command("ls", "kvrelay.cli.store.ls", "its blocks, by name", ("store",)),
    Command(
        "inspect",
        "kvrelay.cli.store.inspect",
        "one block: its header, and whether it is intact",
        ("store",),
    ),
    Command("verify", "kvrelay.cli.store.verify", "read every block back and check it", ("store",)),
    Command("clear", "kvrelay.cli.store.clear", "remove every block without a lease", ("store",)),
    Command(
        "bench",
        "benchmarks.store.run",
        "speed of each transport, beside memcpy and sockets",
        ("store",),
    ),
    Command(
        "simulate",
        "kvrelay.cli.store.simulate",
        "replay a trace through eviction policies",
        ("store",),
    ),
)


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print_out(
            commands.usage(
                PROG,
                "Inspects the store of KV blocks.",
                COMMANDS,
                f"{PROG} COMMAND --help says more.",
            )
        )
        return 0 if words else 2
    command = commands.find(PROG, COMMANDS, words[0])
    if isinstance(command, str):
        print_err(command)
        return 2
    if command.help_without(PROG, words[1:]):
        return 0
    return command.load()(words[1:])
