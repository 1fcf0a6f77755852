"""``kvrelay store stats``: contents and counters of stores, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

from kvrelay.cli.screen import print_err, print_out, table
from kvrelay.cli.store.options import StoreSelection, connected
from kvrelay.config.reader import load
from kvrelay.config.values import show_bytes
from kvrelay.errors import KvrelayError
from kvstore.stats import StoreStats
from kvstore.urls import public_url

DESCRIPTION = """\
Prints the contents of each store, and its counters since it started: blocks, bytes, leases, hits.
Ends with status 1 if a store cannot be reached."""

SERVICES = "services"
"""The label of the unnamed tenant."""

Figures = Mapping[str, object]


def main(argv: Sequence[str]) -> int:
    config = load(StoreSelection, argv, "kvrelay store stats", DESCRIPTION)
    urls = config.urls()
    found = {public_url(url): stats_of(url, config.timeout) for url in urls}
    reached = {
        name: figures(stats) for name, stats in found.items() if isinstance(stats, StoreStats)
    }
    unreachable = {
        name: stats for name, stats in found.items() if not isinstance(stats, StoreStats)
    }
    if config.json:
        failed = {name: {"error": str(error)} for name, error in unreachable.items()}
        print_out(json.dumps({**reached, **failed}, indent=2))
    elif reached:
        print_out(columns(reached))
    for name, error in unreachable.items():
        text = str(error)
        print_err(f"kvrelay store stats: {text if name in text else f'{name}: {text}'}")
    return 1 if unreachable else 0


def stats_of(url: str, timeout: float) -> StoreStats | KvrelayError:
    """The stats of a store, or the error."""
    try:
        with connected(url) as store:
            return store.stats(timeout)
    except KvrelayError as error:
        return error


def figures(value: object) -> dict[str, object]:
    """The fields of a record as JSON; nested records stay nested, except the counters."""
    if not is_dataclass(value):
        return {}
    found: dict[str, object] = {}
    for field in fields(value):
        part: object = getattr(value, field.name)
        if isinstance(part, bytes):
            found[field.name] = part.hex()
        elif isinstance(part, tuple):
            if part:
                found[field.name] = {one.name or SERVICES: figures(one) for one in part}
        elif field.name == "counters":
            found |= figures(part)
        elif is_dataclass(part):
            found[field.name] = figures(part)
        elif isinstance(part, int | float | str):
            found[field.name] = part
    return found


def columns(found: Mapping[str, Figures]) -> str:
    """A row for each figure, a column for each store."""
    flat = {name: _flat(one) for name, one in found.items()}
    names = list(dict.fromkeys(name for one in flat.values() for name in one))
    rows = [[name, *(one.get(name, "") for one in flat.values())] for name in names]
    return table(["", *found], rows, frozenset(range(1, len(found) + 1)))


def _flat(one: Figures, before: str = "") -> dict[str, str]:
    shown: dict[str, str] = {}
    for name, value in one.items():
        label = f"{before}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            shown |= _flat(value, f"{label}: ")
        elif (isinstance(value, int) and name in ("bytes", "budget", "quota")) or "bytes" in name:
            shown[label] = show_bytes(int(str(value)))
        elif isinstance(value, int):
            shown[label] = f"{value:,}"
        else:
            shown[label] = str(value)[:16]
    if isinstance(one.get("hits"), int) and (asked := _number(one, "hits", "misses")):
        shown["hit rate"] = f"{_number(one, 'hits') / asked:.1%}"
    return shown


def _number(one: Figures, *names: str) -> int:
    return sum(value for name in names if isinstance(value := one.get(name), int))
