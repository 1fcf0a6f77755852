"""``kvrelay load`` as a command, with its figures as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.dispatch import main


@dataclass(frozen=True)
class Loaded:
    """What the command said and wrote."""

    status: int
    out: str
    err: str
    json: dict[str, Any]

    @property
    def levels(self) -> list[dict[str, Any]]:
        found = self.json["levels"]
        assert isinstance(found, list)
        return found

    @property
    def check(self) -> dict[str, Any]:
        found = self.json["check"]
        assert isinstance(found, dict)
        return found


class LoadCommand:
    """Runs the command in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *words: object) -> Loaded:
        path = self.folder / "load.json"
        path.unlink(missing_ok=True)
        self._capsys.readouterr()
        given = ["load", *map(str, words), "--json", str(path), "--no-progress"]
        try:
            status = main(given)
        except SystemExit as end:
            status = int(str(end.code))
        seen = self._capsys.readouterr()
        text = path.read_text() if path.exists() else ""
        return Loaded(status, seen.out, seen.err, json.loads(text) if text else {})
