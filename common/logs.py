"""Logging of a process: one line for a record, with time, level, service and message.

Call ``setup`` once at a process's edge; everywhere else ``logging.getLogger(__name__)`` is
enough. Lines go to standard error. Passwords in URLs are never written, and a line break in a
message cannot forge a second record.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_PASSWORD = re.compile(r"(?<=://)[^\s/@]*:[^\s/@]*@")


class Line(logging.Formatter):
    """``12:34:56.789 INFO decode 3f2a: message``."""

    def __init__(self, service: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        message = _PASSWORD.sub("***@", record.getMessage()).replace("\r", "\\r")
        text = f"{clock} {record.levelname} {self._service}: {message}".replace("\n", "\\n")
        if record.exc_info:
            text += "\n" + _PASSWORD.sub("***@", self.formatException(record.exc_info))
        return text


def setup(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends the records of this process at ``level`` and above to ``stream`` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Line(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
