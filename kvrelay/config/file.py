"""The file of a configuration: TOML lines ``name = value`` as texts, with their source.

A name is a flag's name, with ``-`` or ``_``. An unknown name is an error, so that a typing mistake
does not leave a default in place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrelay.config.option import Option
from kvrelay.errors import Rejected


def read_file(
    path: str | None, known: Sequence[Option]
) -> Mapping[str, tuple[tuple[str, ...], str]]:
    """For each option in the file: its texts, and the source to name in errors."""
    if path is None:
        return {}
    by_name = {item.name: item for item in known}
    found = {}
    for key, value in _table(path).items():
        item = by_name.get(key.replace("-", "_"))
        if item is None:
            names = ", ".join(one.name.replace("_", "-") for one in known)
            raise Rejected(key, f"no such option in {path}; there are {names}")
        found[item.name] = (_texts(item, value, path), path)
    return found


def _table(path: str) -> Mapping[str, object]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Rejected("config", f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Rejected("config", f"{path} is not TOML: {error}") from None


def _texts(item: Option, value: object, path: str) -> tuple[str, ...]:
    if isinstance(value, list) and item.repeated:
        return tuple(str(one) for one in value)
    if isinstance(value, str | int | float):
        return (str(value),)
    raise Rejected(item.name, f"{value!r} (from {path}): must be a single value")
