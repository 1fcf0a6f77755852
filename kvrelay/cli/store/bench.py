"""``kvrelay store bench``: how fast the bytes go, each way beside what it could be at best."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.store.run import main as measured


def main(argv: Sequence[str]) -> int:
    return measured(argv, "kvrelay store bench")
