"""``python -m benchmarks.store``."""

import sys

from benchmarks.store.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m benchmarks.store"))
