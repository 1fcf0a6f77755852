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
    """Skip the test if this processor cannot run an object of the variant, tiles aside."""
    needed = build.AVX512_BF16 if variant == build.AMX else variant
    if not runs(needed):
        pytest.skip(f"not a processor for {needed}")


def compile_object(folder: Path, variant: str, sources: Sequence[str]) -> Path:
    """The object of sources in a folder, with the flags of the build."""
    made = folder / "made.so"
    emulated = variant == build.AMX and tiles_refused()
    words = [
        *(*build.compiler(), *build.FLAGS, *build.VARIANTS[variant]),
        *(("-include", str(TILES)) if emulated else ()),
        *(str(folder / source) for source in sources),
    ]
    subprocess.run([*words, "-o", str(made)], check=True, timeout=SECONDS)
    return made
