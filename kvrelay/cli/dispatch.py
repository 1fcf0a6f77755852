"""``kvrelay COMMAND``: finds the command, runs it, and prints an error as one line.

Exit status: 0 done, 1 failed, 2 invalid request, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from kvrelay import __version__
from kvrelay.cli.commands import Command, CommandGroup
from kvrelay.cli.screen import print_err, print_out
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.installation import CLUSTER
from kvrelay.process import sigint

BROKEN_PIPE = 141

COMMANDS = (
    Command(
        "demo", "kvrelay.cli.demo.command", "bring up a small cluster and watch it answer", CLUSTER
    ),
    Command("up", "kvrelay.cli.up", "start a cluster on this machine and keep it serving", CLUSTER),
    Command("generate", "kvrelay.cli.generate", "send one prompt and stream the answer"),
    Command("chat", "kvrelay.cli.chat", "talk to a running cluster, turn by turn"),
    Command("top", "kvrelay.cli.top", "the workers of a router, and their load"),
    Command("role", "kvrelay.cli.role", "turn a decode worker into a prefill worker, or back"),
    Command(
        "load",
        "kvrelay.cli.load.command",
        "load a server, measure it, check every token",
        ("load",),
    ),
    Command(
        "conform", "kvrelay.cli.conform.command", "examine whether a server is exact", ("load",)
    ),
    Command(
        "doctor", "kvrelay.cli.doctor.command", "show what this machine has, and what would be used"
    ),
    Command(
        "bench",
        "benchmarks.cluster.command",
        "measure the cluster against plain transformers",
        CLUSTER,
    ),
    Command(
        "replay",
        "kvrelay.cli.replay",
        "repeat a worker's journal and find differences",
        ("worker",),
    ),
    Command("store", "kvrelay.cli.store.command", "inspect a store, try its eviction on a trace"),
    Command(
        "make-certs",
        "kvrelay.cli.make_certs",
        "certificates and tokens to try TLS with",
        ("certs",),
    ),
    Command("make-model", "benchmarks.make_model", "write a model of random weights", ("worker",)),
)


KVRELAY = CommandGroup(
    "kvrelay",
    "Serves language models with prefill and decode on separate workers.",
    COMMANDS,
    "kvrelay COMMAND --help says more; kvrelay --version shows the version.",
)


def main(argv: Sequence[str]) -> int:
    """The process's edge."""
    words = list(argv)
    if len(words) > 1 and words[0] == "help":
        words = [*words[1:], "--help"]
    if words and words[0] in ("--version", "-V", "version"):
        print_out(f"kvrelay {__version__}")
        return 0
    command = KVRELAY.find(words)
    return command if isinstance(command, int) else guarded(command, words[1:])


def guarded(command: Command, argv: Sequence[str]) -> int:
    """Run a command; every error is one line, never a traceback."""
    try:
        with sigint.sigint_raises():
            status = KVRELAY.run(command, argv)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print_err("")
        return sigint.INTERRUPTED_STATUS
    except BrokenPipeError:
        # The reader closed the pipe: give the flush at exit another target.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        print_err(f"kvrelay {command.name}: {error}")
        with suppress(OSError):
            sys.stdout.close()  # or the failed output is written again at exit
        return 1
    except KvrelayError as error:
        print_err(f"kvrelay {command.name}: {error}")
        return 2 if isinstance(error, Rejected) else 1
