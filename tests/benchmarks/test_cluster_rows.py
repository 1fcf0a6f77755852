"""The table of ``kvrelay bench`` fits a terminal of 80 columns."""

from __future__ import annotations

from benchmarks.cluster.rows import BenchRow, screen


def row(name: str, unit: str, against: str, note: str) -> BenchRow:
    return BenchRow(
        part="a",
        name=name,
        unit=unit,
        ours=123456.0,
        rival=123456.0,
        against=against,
        note=note,
    )


def test_the_widest_rows_fit_80_columns() -> None:
    rows = [
        row("token 0 to token 1, 1,024-token prompt", "ms", "usual later gap", "1024 transferred"),
        row("16 streams of 64+128 tokens", "tokens/s", "transformers generate_batch", ""),
        row(
            "a token, 64 streams",
            "ms",
            "directly to the worker",
            "router adds 1234.56 ms, a bare relay 1234.56 ms",
        ),
    ]
    lines = screen(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 1 + 2 * len(rows)
    assert all(one.against in "".join(lines) and one.note in "".join(lines) for one in rows)
