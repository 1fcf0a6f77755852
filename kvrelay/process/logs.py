"""Logging of a process: one line for a record, with time, level, service and message.

Call ``setup`` once at a process's edge; other modules use ``logging.getLogger(__name__)``. Lines go
to standard error. Passwords in URLs are masked. Line breaks and other control characters in a
message are escaped, so that it cannot forge a second record or control a terminal; in text, every
line of a traceback is indented by two spaces.

A task that serves a request calls ``serves``; other code that knows a request's id logs with
``extra=about(request_id)``. Both put the id into JSON lines.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_FIELDS = "kvrelay_fields"  # of a record: more names and values of its JSON object
_served: ContextVar[str] = ContextVar("kvrelay.request_id", default="")
_trace: ContextVar[str] = ContextVar("kvrelay.trace_id", default="")

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


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time with date and zone, level, service, process id, and message."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "pid": os.getpid(),
            "logger": record.name,
            "message": _shown(record.getMessage()),
        }
        if request_id := _served.get():
            line["request_id"] = request_id
        if trace_id := _trace.get():
            line["trace_id"] = trace_id
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line["exception"] = "\n".join(map(_shown, trace))
        return json.dumps(line, default=str)


def serves(request_id: str) -> None:
    """The current task serves this request from now on."""
    _served.set(request_id)


def traced(trace_id: str) -> None:
    """Add this trace id to the JSON lines that the current task logs."""
    _trace.set(trace_id)


def served() -> str:
    """The request that the current task serves; empty if it serves none."""
    return _served.get()


def about(request_id: str, **fields: object) -> Mapping[str, object]:
    """``extra`` of a record about a request: the fields of its JSON line."""
    return {_FIELDS: {"request_id": request_id, **fields}}


def _shown(text: str) -> str:
    return _PASSWORD.sub("***@", text).translate(_CONTROL)


def about_leg(leg_id: str) -> Mapping[str, object]:
    """The same for a leg on a worker, whose id is that of its request and a number."""
    return about(leg_id.rpartition("/")[0] or leg_id, leg=leg_id)


def setup(
    service: str, level: str = "info", stream: TextIO | None = None, form: str = "text"
) -> None:
    """Send this process's records at ``level`` and above to ``stream`` (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if form == "json" else LogFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
