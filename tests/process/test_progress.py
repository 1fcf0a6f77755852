"""The progress of slow work in the log."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from kvrelay.process.progress import Progress

PHASE = "reading 1.2 GB of weights"


class Noted(logging.Handler):
    """The messages, and an event at the first one of the phase."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if PHASE in self.messages[-1]:
            self.came.set()


@pytest.fixture
def noted() -> Noted:
    return Noted()


def test_slow_work_is_reported_with_its_phase(
    noted: Noted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = SimpleNamespace(monotonic=lambda: 7.0)
    monkeypatch.setattr("kvrelay.process.progress.time", stopped)
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("kvrelay.process.progress")
    logger.addHandler(noted)
    try:
        with Progress(seconds=0.001) as progress:
            progress.phase = PHASE
            assert noted.came.wait(20)
        assert f"{PHASE} (0 s so far)" in noted.messages
    finally:
        logger.removeHandler(noted)


def test_quick_work_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress(seconds=60.0):
        pass
    assert not caplog.records
