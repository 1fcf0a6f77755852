"""``python -m kvstore.bench``."""

import sys

from kvstore.bench.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
