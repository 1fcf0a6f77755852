"""The entry of ``kvrelay``: what a Ctrl-C does is settled before anything else is imported."""

from __future__ import annotations

import sys

from kvrelay.process import sigint


def main() -> int:
    """Runs the command that the process was started with; the exit status."""
    sigint.exit_on_sigint()
    from kvrelay.cli.dispatch import main as dispatch  # imports much: not before the line above

    return dispatch(sys.argv[1:])
