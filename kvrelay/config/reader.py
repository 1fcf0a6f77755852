"""Configuration of a process: one frozen dataclass, read in one place.

A field's value comes from its flag, else the environment, else the file, else its default:
``--block-size 16``, ``KVRELAY_BLOCK_SIZE=16``, ``--config FILE`` with the TOML line
``block-size = 16``. Usage::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StoreConfig:
        host: str = option("127.0.0.1", "address to listen on", metavar="HOST")
        port: int = option(0, "port to listen on; 0 picks a free one", low=0, high=65535)
        budget: int = option(2**30, "memory for blocks", unit="bytes", low=2**20)
        dtype: str = option("auto", "number format", choices=("auto", "float32"))
        prefill: tuple[str, ...] = option((), "a prefill worker")
        store: str | None = option(None, "URL of the store")
        model: str = required(str, "directory of the model", metavar="DIR")

    config = load(StoreConfig, sys.argv[1:], prog="python -m kvstore", description="The store.")

Types: ``str``, ``int``, ``float``, ``bool`` (``--x`` and ``--no-x``), each also ``| None`` or
``tuple[X, ...]`` (the flag may be repeated; commas separate values in the environment). With
``unit="bytes"`` an ``int`` takes suffixes (``1GiB``). A ``secret=True`` field has no flag. A field
that is ``positional`` or has ``environ=False`` is not read from the environment, where its name may
mean something else. Rules
between fields go into ``__post_init__``, which raises ``Rejected(field, message)``; a dataclass
that is also built in code calls ``check(self)`` there to check ranges and choices. ``load`` ends
the process with status 2 and one line on an error, and with 0 after ``--help``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvrelay.config.file import read_file
from kvrelay.config.flags import CommandLineError, parse_flags
from kvrelay.config.option import PREFIX, Option, check, option, options, required
from kvrelay.errors import Rejected

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)
else:
    C = TypeVar("C")

__all__ = ["check", "load", "option", "options", "read", "required"]


def load(
    cls: type[C],
    argv: Sequence[str],
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
    epilog: str = "",
) -> C:
    """The configuration of this process, as the module's docstring says."""
    try:
        return read(cls, argv, prog, description, environ, epilog)
    except (Rejected, CommandLineError) as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"{prog}: {line} (see {prog} --help)\n")
        raise SystemExit(2) from None


def read(
    cls: type[C],
    argv: Sequence[str],
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
    epilog: str = "",
) -> C:
    """Like ``load``, but raises ``Rejected`` or ``CommandLineError``."""
    environ = os.environ if environ is None else environ
    known = options(cls)
    flags, path = parse_flags(known, argv, prog, description, epilog)
    lines = read_file(path or environ.get(PREFIX + "CONFIG"), known)
    values: dict[str, object] = {}
    for item in known:
        texts, source = _find(item, flags, environ, lines)
        if texts is not None:
            values[item.name] = item.read(texts, source)
        elif item.needed:
            where = f"give {item.flag} or set {item.variable}"
            if item.rules.positional:
                where = "give it as an argument"
            raise Rejected(item.name, f"missing; {where}")
    return cls(**values)


def _find(
    item: Option,
    flags: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    lines: Mapping[str, tuple[Sequence[str], str]],
) -> tuple[Sequence[str] | None, str]:
    if item.name in flags:
        return flags[item.name], "the command line" if item.rules.positional else item.flag
    if environ.get(item.variable) and item.rules.environ and not item.rules.positional:
        text = environ[item.variable]
        parts = [part.strip() for part in text.split(",")] if item.repeated else [text]
        return parts, item.variable
    if item.name in lines:
        return lines[item.name]
    return None, "default"
