"""A script in a file: every part arrives, and what is wrong in it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.connector.mock import MockEnd, Script
from kvrelay.connector.script import MockConfig, parse_script, read_script
from kvrelay.errors import Rejected
from kvrelay.usage import Miss

WHOLE = {
    "store": "kvrelay://127.0.0.1:5",
    "lookups": {"*": ["ask"], "r": [None, None, 8, -3]},
    "loads": {
        "r": [
            {"amount": 4, "after": 2, "times": 2, "strays": [-1, 7], "missed": "expired"},
            {"cancels": False},
        ]
    },
    "saves": {"r": [{}, {"amount": 0}]},
    "misses": {"*": ["evicted", "too_late"]},
    "reverse": True,
}


def test_every_part_of_a_file_arrives(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(WHOLE))
    assert read_script(f"mock:{path}") == MockConfig(
        Script(
            lookups={"*": ["ask"], "r": [None, None, 8, -3]},
            loads={"r": [MockEnd(4, 2, 2, (-1, 7), Miss.EXPIRED), MockEnd(cancels=False)]},
            saves={"r": [MockEnd(), MockEnd(0)]},
            misses={"*": [Miss.EVICTED, Miss.TOO_LATE]},
            reverse=True,
        ),
        "kvrelay://127.0.0.1:5",
    )
    assert parse_script({}) == MockConfig(Script(), None)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ([], "script: must be a table"),
        ({"lookup": {}}, "script: has no 'lookup'"),
        ({"lookups": [1]}, "lookups: must be a table"),
        ({"lookups": {"r": []}}, "lookups.r: must be a list"),
        ({"lookups": {"r": [1, "any"]}}, r"lookups.r\[1\]: 'any'"),
        ({"lookups": {"r": [True]}}, r"lookups.r\[0\]: True"),
        ({"loads": {"r": [{"amounts": 1}]}}, r"loads.r\[0\]: has no 'amounts'"),
        ({"loads": {"r": [{"amount": "1"}]}}, r"loads.r\[0\].amount"),
        ({"loads": {"r": [{"cancels": 0}]}}, r"loads.r\[0\].cancels: 0"),
        ({"loads": {"r": [{"after": -1}]}}, r"loads.r\[0\].after"),
        ({"saves": {"r": [{"times": 10**6}]}}, r"saves.r\[0\].times"),
        ({"saves": {"r": [{"strays": 1}]}}, r"saves.r\[0\].strays"),
        ({"misses": {"r": ["lost"]}}, r"misses.r\[0\]: 'lost' is none of never_stored"),
        ({"reverse": 1}, "reverse: 1"),
        ({"store": "mock:again"}, "store: must be the URL of a real store"),
    ],
)
def test_what_is_wrong_is_named(made: object, named: str) -> None:
    with pytest.raises(Rejected, match=named):
        parse_script(made)


@pytest.mark.parametrize("text", [None, "{", "[" * 100_000, "\xff"])
def test_what_is_no_file_of_json_is_refused_with_its_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "script.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(Rejected, match=r"script\.json"):
        read_script(f"mock:{path}")
