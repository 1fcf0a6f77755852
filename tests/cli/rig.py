"""What tests of the command share."""

from __future__ import annotations

import pytest

from kvrelay.cli.dispatch import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status, output and errors of ``kvrelay store``."""
    capsys.readouterr()
    status = main(["store", *words])
    seen = capsys.readouterr()
    return status, seen.out, seen.err
