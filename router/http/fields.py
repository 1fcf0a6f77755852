"""Reads the fields of a JSON body: each has one type, and an error names the field.

``null`` counts as absent, as in OpenAI's own clients.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Never

from kvrelay.errors import Rejected

INT32 = (1 << 31) - 1
UINT32 = (1 << 32) - 1
UINT64 = (1 << 64) - 1
SHOWN = 80  # characters of a wrong value in an error
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def parse_object(raw: bytes) -> Mapping[str, object]:
    """The JSON object of a body. Raises ``Rejected`` for the field ``body``."""
    try:
        value: object = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Rejected("body", f"is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise Rejected("body", "is nested too deeply") from None
    except json.JSONDecodeError as error:
        if raw.startswith(codecs.BOM_UTF8):
            raise Rejected("body", "begins with a byte order mark: leave it out") from None
        raise Rejected("body", f"is not JSON: {error}") from None
    except ValueError:  # the interpreter's limit
        digits = sys.get_int_max_str_digits()
        raise Rejected("body", f"has a number of more than {digits:,} digits") from None
    if not isinstance(value, dict):
        raise Rejected("body", f"must be a JSON object, got {shown(value)}")
    return value


def _no_constant(name: str) -> Never:
    raise Rejected("body", f"is not JSON: {name} is no number of it")


def shown(value: object) -> str:
    """The value as JSON, cut short; no more of it is encoded."""
    text = ""
    try:
        for piece in _ENCODER.iterencode(value):
            text += piece[: SHOWN + 1]
            if len(text) > SHOWN:
                return f"{text[:SHOWN]}..."
    except RecursionError:
        return f"{text}..."
    return text


def wrong(field: str, wanted: str, value: object) -> Rejected:
    """The error for a field of another type."""
    return Rejected(field, f"must be {wanted}, got {shown(value)}")


def checked_text(field: str, value: object) -> str:
    """A string that can be encoded: JSON can also spell half of a surrogate pair."""
    if not isinstance(value, str):
        raise wrong(field, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Rejected(field, f"has half of a surrogate pair at {error.start}") from None
    return value


def checked_whole(field: str, value: object, low: int, high: int) -> int:
    """An integer; JSON of other languages may spell it ``5.0``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(field, "an integer", value)
    if not low <= value <= high:
        raise wrong(field, f"an integer from {low} to {high}", value)
    return value


class Fields:
    """The fields of one object; remembers which were asked for. ``where`` begins their names."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self._values = values
        self._where = where
        self._known: set[str] = set()
        self._tables: list[Fields] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    @property
    def unknown(self) -> list[str]:
        """Names of fields that nothing has read, nested ones included; null counts as absent."""
        given = (name for name, value in self._values.items() if value is not None)
        own = sorted(self._where + name for name in given if name not in self._known)
        return own + [name for table in self._tables for name in table.unknown]

    def raw(self, name: str) -> object:
        """The value of any type; ``None`` if it is absent."""
        self._known.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        return None if value is None else checked_text(self._where + name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self._where + name, "true or false", value)
        return value

    def number(self, name: str) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(self._where + name, "a number", value)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            raise wrong(self._where + name, "a finite number", value)
        return result

    def whole(self, name: str, low: int = -INT32, high: int = INT32) -> int | None:
        value = self.raw(name)
        return None if value is None else checked_whole(self._where + name, value, low, high)

    def table(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong(self._where + name, "an object", value)
        return self.part(name, value)

    def part(self, name: str, values: Mapping[str, object]) -> Fields:
        """An object anywhere inside of this one; what is unknown of it counts too."""
        made = Fields(values, f"{self._where}{name}.")
        self._tables.append(made)
        return made

    def items(self, name: str, kind: str) -> Sequence[object] | None:
        """A list; ``kind`` says of what, in the error."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong(self._where + name, f"a list of {kind}", value)
        return value

    def ids(self, name: str) -> list[int] | None:
        """A list of token ids."""
        values = self.items(name, "token ids")
        if values is None:
            return None
        return checked_ids(self._where + name, values)


def checked_ids(field: str, values: Sequence[object]) -> list[int]:
    """Token ids. The usual list is checked at once."""
    ids = [value for value in values if type(value) is int]
    if len(ids) == len(values) and (not ids or (min(ids) >= 0 and max(ids) <= UINT32)):
        return ids
    return [checked_whole(f"{field}[{i}]", value, 0, UINT32) for i, value in enumerate(values)]
