"""A module that ends with 3 if the garbage collector runs and passes over what was imported."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    sys.exit(3 if gc.isenabled() and gc.get_freeze_count() > 1000 else 1)
