"""Two kinds of plot as SVG text: lines over an axis, and stacked bars."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 800, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 45
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LETTER = 7  # its width
BAR_LETTERS = 22


def lines(
    title: str,
    unit: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    marks: Sequence[str] = (),
) -> str:
    """One line for each series of points; x is seconds, or 1, 2, .. named by ``marks``."""
    points = [point for line in series.values() for point in line]
    most = _round_up(max((y for _, y in points), default=1.0))
    low, high = (0.5, len(marks) + 0.5) if marks else (0.0, max((x for x, _ in points), default=1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    parts = _grid(most, unit)
    if marks:
        named = enumerate(marks, 1)
        room = (WIDTH - LEFT - RIGHT) // len(marks) // LETTER
        parts += [
            _text(place(x, 0)[0], HEIGHT - BOTTOM + 18, _cut(mark, room)) for x, mark in named
        ]
    else:
        ticks = [high * part / 5 for part in range(6)]
        parts += [_text(place(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:.3g} s") for x in ticks]
    for line, colour in zip(series.values(), COLOURS, strict=False):
        spots = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f"<polyline points='{path}' fill=none stroke='{colour}' stroke-width=2 />")
        if len(spots) <= 40:
            parts += [f"<circle cx={x:.1f} cy={y:.1f} r=3 fill='{colour}' />" for x, y in spots]
    return _figure(title, [*parts, *_legend(list(series))])


def bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A stacked bar for each row: the shares of its parts, with their sizes."""
    names = list(dict.fromkeys(name for _, sizes in rows for name in sizes))
    if not names:
        return ""
    room = (HEIGHT - TOP - BOTTOM) / max(len(rows), 1)
    parts = []
    for index, (label, sizes) in enumerate(rows):
        total, across = sum(sizes.values()) or 1.0, float(LEFT + 90)
        top, tall = TOP + index * room, min(room * 0.7, 40)
        parts.append(_text(LEFT + 84, top + tall / 2 + 4, _cut(label, BAR_LETTERS), "end"))
        for name, size in sizes.items():
            wide = size / total * (WIDTH - LEFT - RIGHT - 90)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            what = html.escape(f"{name}: {size:,} ({size / total:.0%})")
            parts.append(
                f"<rect x={across:.1f} y={top:.1f} width={wide:.1f} height={tall:.1f}"
                f" fill='{colour}'><title>{what}</title></rect>"
            )
            if wide > 60:
                parts.append(_text(across + wide / 2, top + tall / 2 + 4, f"{size:,}", fill="#fff"))
            across += wide
    return _figure(title, [*parts, *_legend(names)])


def _figure(title: str, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    return f"<figure>{caption}<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{inside}</svg></figure>"


def _grid(most: float, unit: str) -> list[str]:
    parts = []
    for step in range(6):
        y = HEIGHT - BOTTOM - step / 5 * (HEIGHT - TOP - BOTTOM)
        parts.append(f"<line x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} stroke='#ddd' />")
        parts.append(_text(LEFT - 8, y + 4, f"{most * step / 5:.3g} {unit}", "end"))
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = LEFT + index * 150
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f"<rect x={x} y=6 width=12 height=12 fill='{colour}' />")
        parts.append(_text(x + 18, 16, name, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", fill: str = "currentColor") -> str:
    where = f"x={x:.1f} y={y:.1f} text-anchor={anchor} fill='{fill}'"
    return f"<text {where}>{html.escape(text)}</text>"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 2, 1)]}.."


def _round_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
