"""A page of HTML that needs nothing else: no script, no file, no font."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:68em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,.left td{text-align:left}td:first-child{white-space:nowrap}
h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em}.bad{color:#b00020}.good{color:#00693e}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}figure{margin:1.5em 0}
figcaption{font-weight:600}"""


def page(title: str, head: Mapping[str, object], parts: Iterable[str]) -> str:
    """The parts between what was measured, ``target`` and ``began``, and the ``options``."""
    options = head["options"]
    assert isinstance(options, dict)
    rows = [(str(name), str(value)) for name, value in options.items()]
    return "\n".join(
        (
            "<!doctype html><html lang=en><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width'>",
            f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>",
            paragraph(f"{head['target']}, {head['began']}"),
            *parts,
            f"<h2>Options</h2>{rows_table((), rows, 'left')}</html>",
        )
    )


def paragraph(text: str, kind: str = "") -> str:
    """Of class ``good`` or ``bad``."""
    return f"<p class='{kind}'>{html.escape(text)}</p>"


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """With ``left`` no column is to the right."""
    heads = "".join(f"<th>{html.escape(cell)}" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<table class='{kind}'><tr>{heads}{body}</table>"
