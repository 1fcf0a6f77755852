"""One configuration field: its name everywhere, its type, and what it allows.

``option`` and ``required`` declare a field, ``options`` reads the declarations of a dataclass.
``kvrelay.config.reader`` shows how to use them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from kvrelay.config.values import READERS, show_size, size
from kvrelay.errors import Rejected

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

PREFIX = "KVRELAY_"
_KEY = "kvrelay.option"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRules:
    """What a field declares about itself, besides its type and default."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str | None = None  # shown in the help; "bytes" also allows suffixes
    metavar: str | None = None
    positional: bool = False
    group: str = "options"  # heading of the help page
    secret: bool = False  # never shown, and without a flag: every user can read a command line
    environ: bool = True  # without: the variable of this name is meant for other processes


class _Rules(TypedDict, total=False):
    """The keyword arguments of ``option`` and ``required``: the fields of ``OptionRules``."""

    low: float | None
    high: float | None
    choices: tuple[str, ...]
    unit: str | None
    metavar: str | None
    positional: bool
    group: str
    secret: bool
    environ: bool


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
        """The value of the texts from ``source``; raises ``Rejected`` if one is not valid."""
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
        choices, low, high = self.rules.choices, self.rules.low, self.rules.high
        if choices and not any(_is_choice(value, choice) for choice in choices):
            raise Rejected(self.name, f"{value!r}{source}: choose one of {', '.join(choices)}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if (low is not None and value < low) or (high is not None and value > high):
            raise Rejected(self.name, f"{self.show(value)}{source}: must be {self._range()}")

    def _range(self) -> str:
        low, high = self.rules.low, self.rules.high
        if low is None or high is None:
            return f"at least {self.show(low)}" if high is None else f"at most {self.show(high)}"
        return f"between {self.show(low)} and {self.show(high)}"


def option(default: T, help: str, **more: Unpack[_Rules]) -> T:
    """A field with a default; ``more`` are fields of ``OptionRules``."""
    rules = OptionRules(help=help, **more)
    return field(default=default, metadata={_KEY: rules}, repr=not rules.secret)


def required(kind: type[T], help: str, **more: Unpack[_Rules]) -> T:
    """A field that must be given; the dataclass needs ``kw_only=True``."""
    return cast(T, field(metadata={_KEY: OptionRules(help=help, **more)}))


def options(cls: type[DataclassInstance]) -> tuple[Option, ...]:
    """The declared options of a configuration, in order; other fields are left out."""
    hints = get_type_hints(cls)
    declared = [item for item in dataclasses.fields(cls) if _KEY in item.metadata]
    return tuple(
        Option(item.name, *_kind(hints[item.name]), item.default, item.metadata[_KEY])
        for item in declared
    )


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


def check_unset(config: DataclassInstance, names: Collection[str], reason: str) -> None:
    """Raise ``Rejected`` with ``reason`` if one of these options does not have its default.

    For options that have no effect together with others.
    """
    for item in options(type(config)):
        if item.name in names and (value := getattr(config, item.name)) != item.default:
            raise Rejected(item.name, f"{item.show(value)}: {reason}")


def _is_choice(value: object, choice: str) -> bool:
    """Whether a value is the choice; one that ends in ``:N`` stands for all numbers there."""
    before, _, number = str(value).partition(":")
    if choice.endswith(":N"):
        return before == choice[:-2] and number.isascii() and number.isdigit()
    return value == choice
