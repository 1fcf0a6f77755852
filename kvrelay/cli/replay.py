"""``kvrelay replay FILE``: repeats a worker's journal on the same core, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.config.reader import load, option, required

DESCRIPTION = """\
Repeats the journal that a worker wrote with --journal FILE: every call of its scheduler, with the
replies it got. The core is pure, so every plan, counter and usage must come out the same; the first
event that differs is shown. Ends with status 1 if one differs, 2 if FILE is not a journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The journal to replay."""

    file: str = required(str, "the journal", metavar="FILE", positional=True)
    json: bool = option(False, "print the result as JSON")


def main(argv: Sequence[str]) -> int:
    config = load(ReplayConfig, argv, "kvrelay replay", DESCRIPTION)
    from kvrelay.engine.core import replay

    return replay.main([config.file], config.json)
