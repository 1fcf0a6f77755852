"""The entry of ``kvrelay``: sets the handler of Ctrl-C before it imports anything else."""

from __future__ import annotations

import sys

from kvrelay.process import sigint


def main() -> int:
    """Run the command of this process's command line; returns the exit status."""
    sigint.exit_on_sigint()
    from kvrelay.cli.dispatch import main as dispatch  # slow imports: after the line above

    return dispatch(sys.argv[1:])
