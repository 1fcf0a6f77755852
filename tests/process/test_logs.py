"""Log lines: one record is one line, and no password is written."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from contextvars import copy_context
from datetime import UTC, datetime

import pytest

from kvrelay.process import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    made = io.StringIO()
    logs.setup("decode", "info", made)
    yield made
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_has_time_level_service_and_message(stream: io.StringIO) -> None:
    logging.getLogger("some.module").info("ready on %s", "127.0.0.1:1")
    logging.getLogger("some.module").debug("not shown")
    line = stream.getvalue()
    assert line.endswith(" INFO decode: ready on 127.0.0.1:1\n")
    assert line[2] == line[5] == ":"
    assert line.count("\n") == 1


@pytest.fixture
def json_stream(stream: io.StringIO) -> io.StringIO:
    logs.setup("decode", "info", stream, form="json")
    return stream


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_date_zone_and_the_request_that_its_task_serves(
    json_stream: io.StringIO,
) -> None:
    def serve(request_id: str) -> None:
        logs.serves(request_id)
        logging.getLogger("some.module").warning("slow")

    for name in ("a", "b"):
        copy_context().run(serve, name)
    logging.getLogger("other").info("ready")
    first, second, other = lines_of(json_stream)
    assert first == {
        "time": first["time"],
        "level": "WARNING",
        "service": "decode",
        "pid": os.getpid(),
        "logger": "some.module",
        "message": "slow",
        "request_id": "a",
    }
    written = datetime.fromisoformat(str(first["time"]))
    assert written.tzinfo is not None
    assert abs((datetime.now(UTC) - written).total_seconds()) < 600
    assert second["request_id"] == "b"
    assert "request_id" not in other


def test_a_json_line_names_the_request_of_a_leg(json_stream: io.StringIO) -> None:
    logging.warning("no text", extra=logs.about_leg("chat/7/3"))
    (line,) = lines_of(json_stream)
    assert line["request_id"] == "chat/7"
    assert line["leg"] == "chat/7/3"


def test_a_json_line_is_one_line_without_passwords_and_control_characters(
    json_stream: io.StringIO,
) -> None:
    try:
        raise ValueError("redis://:secret@host\n\x1b[2J\u2028\ud800")
    except ValueError:
        logging.exception("request %s failed", '"}\n{\x7f')
    text = json_stream.getvalue()
    (line,) = lines_of(json_stream)
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert "secret" not in text
    assert line["message"] == r'request "}\n{\x7f failed'
    assert str(line["exception"]).startswith("Traceback")
    assert r"\x1b[2J" in str(line["exception"])


def test_passwords_and_line_breaks(stream: io.StringIO) -> None:
    logging.warning("store redis://user:secret@host:6379/0 said\nERROR forged")
    line = stream.getvalue()
    assert "secret" not in line
    assert "redis://***@host:6379/0" in line
    assert line.count("\n") == 1


def test_control_characters_are_shown_and_not_obeyed(stream: io.StringIO) -> None:
    try:
        raise ValueError("\x1b[2J\n12:00:00.000 ERROR decode: forged \x07")
    except ValueError:
        logging.exception("request %s failed", "\x1b[31m\x85\u2028\x0bred")
    first = stream.getvalue().splitlines()[0]
    assert first.endswith(r"request \x1b[31m\x85\u2028\x0bred failed")
    assert stream.getvalue().replace("\n", "").isprintable()


def test_the_text_of_an_error_cannot_forge_a_record(stream: io.StringIO) -> None:
    try:
        raise ValueError("unknown\n12:00:00.000 ERROR decode: forged")
    except ValueError:
        logging.exception("failed")
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("failed")
    assert any("forged" in line for line in others)
    assert all(line.startswith("  ") for line in others)


def test_an_exception_is_written_whole_and_without_passwords(stream: io.StringIO) -> None:
    try:
        raise ValueError("redis://:secret@host")
    except ValueError:
        logging.exception("failed")
    text = stream.getvalue()
    assert "Traceback" in text
    assert "secret" not in text
