"""The command under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load.rig import LoadCommand


@pytest.fixture
def load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> LoadCommand:
    """``kvrelay load``."""
    return LoadCommand(tmp_path, capsys)
