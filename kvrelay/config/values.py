"""Converts text to the value of a configuration field: numbers, byte sizes, booleans.

A text means the same from a flag, the environment and a file. A ``ValueError`` says what a valid
text looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


def whole(text: str) -> int:
    """An integer in decimal notation; underscores between digits are allowed."""
    try:
        return int(text.strip())
    except ValueError:
        raise ValueError("expected a whole number, for example 16") from None


def number(text: str) -> float:
    """A finite decimal number."""
    try:
        value = float(text.strip())
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("expected a finite number, for example 0.5")
    return value


def boolean(text: str) -> bool:
    """Yes or no, in the usual spellings."""
    folded = text.strip().lower()
    if folded in _YES or folded in _NO:
        return folded in _YES
    raise ValueError("expected yes or no (also true, false, on, off, 1, 0)")


def size(text: str) -> int:
    """A number of bytes: ``1GiB`` or ``1G`` is 2**30, ``1GB`` is 10**9, a bare number is bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size, for example 512MiB, 1GiB or 1000000")
    digits, prefix, binary, byte = match.groups()
    base = 1000 if prefix and byte and not binary else 1024
    return int(Fraction(digits) * base ** _POWERS[prefix.upper()])  # exact at any size


def show_size(value: int) -> str:
    """The size as a person writes it; exact, so ``size(show_size(n)) == n``."""
    for suffix, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{suffix}"
    return str(value)


def show_bytes(value: int) -> str:
    """The size as a person reads it, rounded."""
    amount = float(value)
    for suffix in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{value:,} bytes" if suffix == "bytes" else f"{amount:.1f} {suffix}"
        amount /= 1024
    return f"{amount:,.1f} TiB"


READERS: Mapping[type, Callable[[str], object]] = {
    str: str,
    int: whole,
    float: number,
    bool: boolean,
}
