"""Objects compiled in tests; those for AMX run on emulated tiles where the processor has none."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.engine.attention.native import build
from kvrelay.engine.attention.native.library import runs, tiles_refused

TILES = Path(__file__).with_name("emulated_tiles.h")
SECONDS = 200


def need(variant: str) -> None:
    """Skip the test if an object of the variant cannot be compiled or, tiles aside, run here."""
    needed = build.AVX512_BF16 if variant == build.AMX else variant
    if not runs(needed):
        pytest.skip(f"not a processor for {needed}")
    if build.whole_object(variant) is None:
        pytest.skip(f"not a compiler for {variant}")


def compile_object(made: Path, variant: str, sources: Sequence[Path]) -> Path:
    """Compile sources into ``made``, with the flags of the build."""
    emulated = variant == build.AMX and tiles_refused()
    words = [
        *(*build.compiler(), *build.FLAGS, *build.VARIANTS[variant]),
        *(("-include", str(TILES)) if emulated else ()),
        *map(str, sources),
    ]
    subprocess.run([*words, "-o", str(made)], check=True, timeout=SECONDS)
    return made
