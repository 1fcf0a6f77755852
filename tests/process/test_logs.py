"""Log lines: one record is one line, and no password is written."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

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
