"""``python -m kvrelay`` is ``kvrelay``."""

import sys

from kvrelay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
