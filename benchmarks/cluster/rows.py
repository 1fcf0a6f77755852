"""A measured row: the quantity, both figures, and their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal

from kvrelay.cli.screen import paint, table

Better = Literal["less", "more"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """``ours`` against ``rival`` in the same ``unit``; ``None`` where there is nothing to measure.

    ``rival`` is the figure of the baseline that ``against`` names: another program, or another
    path through kvrelay.
    """

    part: str
    name: str
    unit: str
    ours: float | None
    rival: float | None
    against: str
    better: Better = "less"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better kvrelay is; under 1 is worse."""
        if not self.ours or not self.rival:
            return None
        return self.rival / self.ours if self.better == "less" else self.ours / self.rival

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


def cells(row: BenchRow) -> tuple[str, ...]:
    """The row as it is printed."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f} x"
    return (row.name, row.unit, figure(row.ours), figure(row.rival), ratio, row.against, row.note)


HEAD = ("measured", "unit", "kvrelay", "other", "ratio", "other is", "")


def figure(value: float | None) -> str:
    """Three significant digits, thousands as a whole."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def screen(rows: Sequence[BenchRow]) -> str:
    """A table of at most 80 columns: below each row, what the other figure is, and the note."""
    head, *lines = table(HEAD[:5], [cells(row)[:5] for row in rows], frozenset({2, 3, 4})).split(
        "\n"
    )
    below = ("; ".join(filter(None, (f"vs {row.against}", row.note))) for row in rows)
    pairs = zip(lines, (paint(f"    {text}", "dim") for text in below), strict=True)
    return "\n".join([head, *chain.from_iterable(pairs)])


def markdown(rows: Sequence[BenchRow]) -> str:
    """A table for benchmarks/README.md."""
    lines = ["| " + " | ".join(HEAD[:-1]) + " | note |", "|---|---|--:|--:|--:|---|---|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)
