"""``python -m kvstore``: the store as a process of its own."""

from __future__ import annotations

import sys

from kvrelay.process import sigint

if __name__ == "__main__":
    sigint.exit_on_sigint()
    from kvrelay import installation  # no import before the line above

    installation.require_service("kvstore", "store", "The store as a process of its own.")
    from kvstore.main import main

    status = main(sys.argv[1:])
    sigint.exit_on_sigint()
    sys.exit(status)
