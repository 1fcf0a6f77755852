"""A run as values for JSON, as lines of text, and as a page of HTML that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from kvrelay.conform.abilities import ABILITIES, Abilities
from kvrelay.conform.checks import KINDS
from kvrelay.conform.suite import Row
from kvrelay.conform.tally import ConformOutcome, Tally
from kvrelay.load.openai_server import Json
from kvrelay.load.pages import page, paragraph, rows_table

CLASSES = {
    ConformOutcome.EXACT: "good",
    ConformOutcome.DIFFERS: "bad",
    ConformOutcome.FAILED: "bad",
}


def report_json(head: Json, abilities: Abilities | None, rows: Sequence[Row], status: int) -> Json:
    server: Json = {}
    if abilities is not None:
        has = {name: abilities.has(name) for name in ABILITIES}
        server = {"engine": abilities.engine, "abilities": has, "missing": abilities.missing}
    checks = [
        {"name": row.name, "title": row.title, **{k: _tally(t) for k, t in row.tallies.items()}}
        for row in rows
    ]
    return {**head, "server": server, "checks": checks, "status": status}


def _tally(tally: Tally) -> Json:
    return {
        "outcome": str(tally.outcome),
        "compared": tally.compared,
        "differing": tally.differing,
        "untold": tally.untold,
        "logprob_gap": tally.gap,
        "reason": tally.error or tally.why_missing,
        "differences": tally.differences,
        "notes": tally.notes,
    }


def abilities_line(abilities: Abilities) -> str:
    """What the server has, and what it lacks."""
    has = [title for name, title in ABILITIES.items() if abilities.has(name)]
    lacks = [title for name, title in ABILITIES.items() if not abilities.has(name)]
    without = f"; without {', '.join(lacks)}" if lacks else ""
    door = "chats" if abilities.chat else "completions"
    return f"{door}, with {', '.join(has) or 'none of the abilities'}{without}"


def verdict(tally: Tally | None) -> str:
    """A cell of the table."""
    if tally is None:
        return "-"
    match tally.outcome:
        case ConformOutcome.EXACT:
            return f"exact ({tally.compared:,})"
        case ConformOutcome.DIFFERS:
            return f"differs ({tally.differing:,} of {tally.compared:,})"
        case other:
            return str(other)


def details(row: Row) -> Iterator[tuple[ConformOutcome, str]]:
    """Lines below the table: differences, reasons, notes."""
    for kind, tally in row.tallies.items():
        what = row.title if kind not in KINDS else f"{row.title}, {kind}"
        for line in tally.differences:
            yield ConformOutcome.DIFFERS, f"{what}: {line}"
        if tally.error is not None:
            yield ConformOutcome.FAILED, f"{what}: {tally.error}"
        elif tally.why_missing is not None:
            yield tally.outcome, f"{what}: {tally.why_missing}"
        notes = list(tally.notes)
        if tally.untold and tally.compared:
            notes.append(f"{tally.untold:,} pairs without text or token ids were not compared")
        if tally.gap:
            notes.append(f"log probabilities of equal tokens differ by up to {tally.gap:.2g}")
        if notes:
            yield ConformOutcome.EXACT, f"{what}: {'; '.join(notes)}"


def html_page(
    head: Json, abilities: Abilities | None, rows: Sequence[Row], closing: str, status: int
) -> str:
    """Verdict, the table, and the details of each row."""
    cells = [(row.title, *map(verdict, row.cells())) for row in rows]
    found = [
        f"<tr class={CLASSES.get(outcome, 'plain')}><td>{outcome}<td>{html.escape(line)}"
        for row in rows
        for outcome, line in details(row)
    ]
    about = (
        paragraph(f"{abilities.engine}: {abilities_line(abilities)}")
        if abilities is not None
        else ""
    )
    table = rows_table(("check", *KINDS), cells)
    return page(
        "kvrelay conform",
        head,
        [
            paragraph(closing, "bad" if status else "good"),
            about,
            table,
            f"<h2>Details</h2><table class=left>{''.join(found)}</table>",
        ],
    )
