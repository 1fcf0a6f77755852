"""Modules of the product with a mistake, which the tests must find."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

Mistake = Sequence[tuple[str, str]]
"""Pieces of a module's text, and what stands in their place."""


def module_of(source: ModuleType, mistake: Mistake) -> ModuleType:
    """A module of the product with a mistake; without any, a copy."""
    text = Path(str(source.__file__)).read_text(encoding="utf-8")
    for before, after in mistake:
        assert text.count(before) == 1, f"{source.__name__} has {text.count(before)} of: {before}"
        text = text.replace(before, after)
    made = ModuleType(source.__name__)
    sys.modules[made.__name__] = made  # dataclasses look it up
    try:
        exec(compile(text, str(source.__file__), "exec"), made.__dict__)
    finally:
        sys.modules[made.__name__] = source
    return made
