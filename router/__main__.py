"""``python -m router``: the router as a process of its own."""

from __future__ import annotations

import sys

from common import ctrlc

if __name__ == "__main__":
    ctrlc.ends()
    from router.main import main  # imports much: not before the line above

    status = main(sys.argv[1:])
    ctrlc.ends()
    sys.exit(status)
