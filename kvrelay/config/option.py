"""One configuration field: its name everywhere, its type, and what it allows.

``option`` and ``required`` declare a field, ``options`` reads the declarations of a dataclass.
``kvrelay.config.reader`` shows how to use them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvrelay.config.values import READERS, show_size, size
from kvrelay.errors import Rejected

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

PREFIX = "KVRELAY_"
_KEY = "kvrelay.option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRules:
    """What a field declares about itself, beside its type and default."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str | None = None
    metavar: str | None = None
    positional: bool = False
    group: str = "options"  # heading of the help page
    secret: bool = False  # has no flag: every user can read a command line
    environ: bool = True  # without: the variable of this name is meant for other processes


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a configuration, for the readers of flags, environment and file."""

    name: str
    kind: type
    repeated: bool
    default: object
    rules: OptionRules

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def needed(self) -> bool:
        return self.default is dataclasses.MISSING

    def show(self, value: object) -> str:
        """A value as a user would write it."""
        if isinstance(value, tuple):
            return ",".join(self.show(item) for item in value)
        if self.rules.unit == "bytes" and isinstance(value, int):
            return show_size(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return str(value)

    def read(self, texts: Sequence[str], source: str) -> object:
        """The value of the texts found at ``source``; ``Rejected`` if they are not valid."""
        if self.repeated and self.kind is not str:  # a number contains no comma
            texts = [part for text in texts for part in text.split(",")]
        values = tuple(self._read_one(text, source) for text in texts)
        return values if self.repeated else values[-1]

    def _read_one(self, text: str, source: str) -> object:
        reader = size if self.rules.unit == "bytes" else READERS[self.kind]
        try:
            value = reader(text)
        except ValueError as error:
            shown = "its value" if self.rules.secret else repr(text)
            raise Rejected(self.name, f"{shown} (from {source}): {error}") from None
        self.check(value, f" (from {source})")
        return value

    def check(self, value: object, source: str = "") -> None:
        """Raise ``Rejected`` if the value is outside the declared range or choices."""
        rules = self.rules
        if rules.choices and value not in rules.choices:
            raise Rejected(
                self.name, f"{value!r}{source}: choose one of {', '.join(rules.choices)}"
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            low, high = rules.low, rules.high
            if (low is not None and value < low) or (high is not None and value > high):
                shown = self.show(value)
                raise Rejected(self.name, f"{shown}{source}: must be {self._range()}")

    def _range(self) -> str:
        low, high = self.rules.low, self.rules.high
        if low is None or high is None:
            return f"at least {self.show(low)}" if high is None else f"at most {self.show(high)}"
        return f"between {self.show(low)} and {self.show(high)}"


def option(
    default: T,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    unit: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    group: str = "options",
    secret: bool = False,
    environ: bool = True,
) -> T:
    """A field with a default. ``unit`` is shown in the help; ``"bytes"`` also allows suffixes.

    A ``secret`` is read from the environment or the file only, and never shown.
    """
    rules = OptionRules(
        help=help,
        low=low,
        high=high,
        choices=choices,
        unit=unit,
        metavar=metavar,
        positional=positional,
        group=group,
        secret=secret,
        environ=environ,
    )
    return field(default=default, metadata={_KEY: rules}, repr=not secret)


def required(
    kind: type[T],
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    positional: bool = False,
) -> T:
    """A field that must be given; the dataclass needs ``kw_only=True``."""
    rules = OptionRules(help=help, choices=choices, metavar=metavar, positional=positional)
    return cast(T, field(metadata={_KEY: rules}))


def options(cls: type[DataclassInstance]) -> tuple[Option, ...]:
    """The declared options of a configuration, in order; other fields are left out."""
    hints = get_type_hints(cls)
    found = []
    for item in dataclasses.fields(cls):
        rules = item.metadata.get(_KEY)
        if isinstance(rules, OptionRules):
            kind, repeated = _kind(hints[item.name])
            found.append(Option(item.name, kind, repeated, item.default, rules))
    return tuple(found)


def _kind(hint: object) -> tuple[type, bool]:
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _kind(next(item for item in arguments if item is not type(None)))
    if get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _kind(arguments[0])[0], True
    if isinstance(hint, type) and hint in READERS:
        return hint, False
    raise TypeError(f"a configuration field cannot have the type {hint!r}")


def check(config: DataclassInstance) -> None:
    """Check ranges and choices of a configuration built in code; raises ``Rejected``."""
    for item in options(type(config)):
        value = getattr(config, item.name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                item.check(one)
