"""The command line of a configuration: flags as texts, and the help page.

Nothing is converted here: a flag's text is read like one from the environment or a file.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kvrelay.config.option import Option


class CommandLineError(Exception):
    """The command line is malformed; the message is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandLineError(message)


def parse_flags(
    known: Sequence[Option], argv: Sequence[str], prog: str, description: str, epilog: str
) -> tuple[Mapping[str, Sequence[str]], str | None]:
    """The texts given for each field, and the path after ``--config``; ends after ``--help``."""
    parser = _parser(known, prog, description, epilog)
    space, rest = parser.parse_known_args(list(argv))
    if rest:
        raise CommandLineError(_unknown(rest[0], known))
    given: Mapping[str, object] = vars(space)
    path = given.get("config")
    texts = {}
    for item in known:
        value = given.get(item.name)
        if value not in (None, []):
            parts = value if isinstance(value, list) else [value]
            texts[item.name] = [str(part) for part in parts]
    return texts, path if isinstance(path, str) else None


def _unknown(word: str, known: Sequence[Option]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    flags = [item.flag for item in known if not (item.rules.positional or item.rules.secret)]
    close = difflib.get_close_matches(word.split("=")[0], [*flags, "--config"], 1)
    return f"unknown flag {word}" + (f"; did you mean {close[0]}?" if close else "")


def _parser(known: Sequence[Option], prog: str, description: str, epilog: str) -> _Parser:
    width = min(shutil.get_terminal_size().columns, 100)
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {_usage(known)}",
        description=_wrapped(description, width),
        epilog="\n\n".join(filter(None, (_elsewhere(known, width), epilog.rstrip()))),
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=width
        ),
    )
    names = dict.fromkeys(("arguments", "options", *(item.rules.group for item in known)))
    groups = {name: parser.add_argument_group(name) for name in names}
    flags = groups["options"]
    for item in known:
        if not item.rules.secret:
            _add(groups["arguments" if item.rules.positional else item.rules.group], item)
    about = "read options from a file: TOML, one 'name = value' a line"
    flags.add_argument("--config", metavar="FILE", help=about)
    flags.add_argument("-h", "--help", action="help", help="show this page and exit")
    return parser


def _elsewhere(known: Sequence[Option], width: int) -> str:
    """Where values come from without a flag: the environment."""
    own = [item for item in known if not (item.rules.positional or item.rules.secret)]
    read = [item for item in own if item.rules.environ]
    rules = []
    if read:
        but = ", ".join(item.flag for item in own if not item.rules.environ)
        every = f"Every option but {but}" if but else "Every option"
        first = min(read, key=lambda item: item.rules.group != "options")
        shown = f"{first.variable} for {first.flag}"
        rules.append(f"{every} can be set in the environment: {shown}, and so on.")
    rules += (f"{item.variable}: {item.rules.help}." for item in known if item.rules.secret)
    return "\n".join(textwrap.fill(rule, width) for rule in rules)


def _wrapped(text: str, width: int) -> str:
    """Its paragraphs, as wide as the page."""
    return "\n\n".join(textwrap.fill(one, width) for one in text.split("\n\n"))


def _usage(known: Sequence[Option]) -> str:
    flags, words = [], []
    for item in known:
        if item.rules.positional:
            words.append(_metavar(item) if item.needed else f"[{_metavar(item)}]")
        elif item.needed:
            flags.append(f"{item.flag} {_metavar(item)}")
    return " ".join([*flags, *words, "[options]"])


def _metavar(item: Option) -> str:
    rules = item.rules
    if rules.metavar:
        return rules.metavar
    if rules.choices:
        return "|".join(rules.choices)
    return {int: "N", float: "X"}.get(item.kind, "TEXT") if rules.unit != "bytes" else "SIZE"


def _help(item: Option) -> str:
    notes = [f"in {item.rules.unit}"] if item.rules.unit not in (None, "bytes") else []
    if item.needed:
        notes.append("required")
    elif item.default not in (None, (), "") and not (item.kind is bool and not item.repeated):
        notes.append(f"default {item.show(item.default)}")
    if item.repeated and not item.rules.positional:
        notes.append("may be repeated")
    return (item.rules.help + (f" [{'; '.join(notes)}]" if notes else "")).replace("%", "%%")


def _add(group: argparse._ArgumentGroup, item: Option) -> None:
    text, metavar = _help(item), _metavar(item)
    if item.rules.positional:
        count = "*" if item.repeated else "?"
        group.add_argument(item.name, nargs=count, metavar=metavar, help=text)
    elif item.kind is bool:
        _add_switch(group, item, text)
    elif item.repeated:
        group.add_argument(item.flag, action="append", metavar=metavar, help=text)
    else:
        group.add_argument(item.flag, metavar=metavar, help=text)


def _add_switch(group: argparse._ArgumentGroup, item: Option, text: str) -> None:
    """Accept ``--x`` and ``--no-x``; the help shows the flag that changes the default."""
    for value, flag in ((True, item.flag), (False, "--no-" + item.flag[2:])):
        shown = argparse.SUPPRESS if value is item.default else text
        group.add_argument(
            flag, dest=item.name, action="store_const", const=value, default=None, help=shown
        )
