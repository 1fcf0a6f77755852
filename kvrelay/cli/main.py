"""``kvrelay COMMAND``: finds the command, runs it, and turns what goes wrong into one line.

Exit status: 0 done, 1 failed, 2 asked for something that cannot be, 130 after Ctrl-C.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from common.errors import KvrelayError, Rejected
from kvrelay import __version__
from kvrelay.cli.screen import paint, say, tell

BROKEN_PIPE = 141
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module that holds its ``main``, imported when it is called."""

    name: str
    module: str
    summary: str

    def run(self, argv: Sequence[str]) -> int:
        main: Callable[[Sequence[str]], int] = import_module(self.module).main
        return main(argv)


COMMANDS = (
    Command("demo", "kvrelay.cli.demo", "bring up a small cluster and watch it answer"),
    Command("up", "kvrelay.cli.up", "start a cluster on this machine and keep it serving"),
    Command("generate", "kvrelay.cli.generate", "send one prompt and stream the answer"),
    Command("doctor", "kvrelay.cli.doctor", "what this machine has, and what would be used"),
    Command("bench", "kvrelay.cli.bench", "measure the cluster beside plain transformers"),
    Command("replay", "kvrelay.cli.replay", "repeat a worker's journal, find what differs"),
    Command("make-model", "kvrelay.cli.make_model", "write a model of random weights"),
)


def usage() -> str:
    """The page of ``kvrelay --help``."""
    lines = [
        "usage: kvrelay COMMAND [options]",
        "",
        "Serves language models with prefill and decode on separate workers.",
        "",
        paint("commands:", "bold"),
        *(f"  {command.name:<12}{command.summary}" for command in COMMANDS),
        "",
        "kvrelay COMMAND --help says more; kvrelay --version shows the version.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The process's edge."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        say(usage())
        return 0 if words else 2
    if words[0] in ("--version", "-V", "version"):
        say(f"kvrelay {__version__}")
        return 0
    command = next((one for one in COMMANDS if one.name == words[0]), None)
    if command is None:
        tell(_unknown(words[0]))
        return 2
    return guarded(command, words[1:])


def guarded(command: Command, argv: Sequence[str]) -> int:
    """Runs a command; every error is one line, none a traceback."""
    try:
        status = command.run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        tell("")
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more: let the flush at exit have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Rejected as error:
        tell(f"kvrelay {command.name}: {error}")
        return 2
    except KvrelayError as error:
        tell(f"kvrelay {command.name}: {error}")
        return 1


def _unknown(word: str) -> str:
    names = [command.name for command in COMMANDS]
    close = difflib.get_close_matches(word, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
    return f"kvrelay: no command {word!r}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
