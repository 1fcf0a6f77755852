"""``python -m kvrelay`` is ``kvrelay``, and like it does not search the current folder for modules.

Unless kvrelay itself lies there: a clone that is not installed.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] == os.getcwd() != HOME:
        del sys.path[0]
    from kvrelay.cli.main import main

    sys.exit(main())
