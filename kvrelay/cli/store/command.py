"""``kvrelay store COMMAND``: the table of its commands, one module each."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.cli.commands import Command, CommandGroup

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
        "speed of each transport, against memcpy and plain sockets",
        ("store",),
    ),
    Command(
        "simulate",
        "kvrelay.cli.store.simulate",
        "replay a trace through eviction policies",
        ("store",),
    ),
)


STORE = CommandGroup(
    "kvrelay store",
    "Inspects the store of KV blocks.",
    COMMANDS,
    "kvrelay store COMMAND --help says more.",
)


def main(argv: Sequence[str]) -> int:
    command = STORE.find(argv)
    return command if isinstance(command, int) else STORE.run(command, argv[1:])
