"""Logging of a process: one line for a record, with time, level, service and message.

Call ``setup`` once at a process's edge; other modules use ``logging.getLogger(__name__)``. Lines go
to standard error. Passwords in URLs are masked. Line breaks and other control characters in a
message are escaped, so that it cannot forge a second record or control a terminal; every line of a
traceback is indented by two spaces.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_PASSWORD = re.compile(r"(?<=://)[^\s/@]*:[^\s/@]*@")


class LogFormatter(logging.Formatter):
    """``12:34:56.789 INFO decode 3f2a: message``."""

    def __init__(self, service: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        message = _shown(record.getMessage())
        text = f"{clock} {record.levelname} {self._service}: {message}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            text += "".join(f"\n  {_shown(line)}" for line in trace)
        return text


def _shown(text: str) -> str:
    return _PASSWORD.sub("***@", text).translate(_CONTROL)


def setup(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send this process's records at ``level`` and above to ``stream`` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
