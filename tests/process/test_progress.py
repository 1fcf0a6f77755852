"""The progress of slow work in the log."""

from __future__ import annotations

import logging
import threading

import pytest

from kvrelay.process.progress import Progress


class Noted(logging.Handler):
    """The messages, and an event at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.first.set()


@pytest.fixture
def noted() -> Noted:
    return Noted()


def test_slow_work_is_reported_with_its_phase(
    noted: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("kvrelay.process.progress")
    logger.addHandler(noted)
    try:
        with Progress(seconds=0.001) as progress:
            progress.phase = "reading 1.2 GB of weights"
            noted.first.clear()
            assert noted.first.wait(20)
        assert "reading 1.2 GB of weights (0 s so far)" in noted.messages
    finally:
        logger.removeHandler(noted)


def test_quick_work_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress(seconds=60.0):
        pass
    assert not caplog.records
