"""Names are of the field: words that were retired do not come back (CONTRIBUTING.md, Glossary)."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.sources import ROOT, python_files, show

RETIRED = {
    "arm": "backend",
    "arms": "backends",
    "book": "index",
    "books": "indexes",
    "careful": "safe connector",
    "duel": "shadow LRU",
    "lane": "socket transport",
    "lanes": "socket transports",
    "nursery": "fork server",
    "pulse": "liveness",
    "stay": "leg call",
    "vault": "block store",
    "ways": "transports",
}
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
IDLE = "As the protocol says."
"""A docstring that an overriding method inherits says more."""


def test_no_name_has_a_retired_word() -> None:
    wrong = [
        f"{where}: {name}: say {RETIRED[word.lower()]}"
        for where, name in (*_python_names(), *_proto_names())
        for word in WORD.findall(name)
        if word.lower() in RETIRED
    ]
    assert not wrong, "\n".join(wrong)


def test_no_docstring_says_nothing() -> None:
    files = (*python_files(), *python_files("benchmarks", "tests"))
    wrong = [
        show(path)
        for path in files
        if path != Path(__file__) and IDLE in path.read_text(encoding="utf-8")
    ]
    assert not wrong, wrong


def _python_names() -> Iterator[tuple[str, str]]:
    for path in (*python_files(), *python_files("benchmarks")):
        yield show(path), path.stem
        with path.open(encoding="utf-8") as source:
            for token in tokenize.generate_tokens(source.readline):
                if token.type == tokenize.NAME:
                    yield f"{show(path)}:{token.start[0]}", token.string


def _proto_names() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "protos").rglob("*.proto"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            for name in re.findall(r"\w+", line.partition("//")[0]):
                yield f"{show(path)}:{number}", name
