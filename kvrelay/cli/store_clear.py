"""``kvrelay store clear``: removes every block that no lease holds, if that is really wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import load, option
from common.errors import Rejected
from kvrelay.cli.screen import say, tell
from kvrelay.cli.storeconfig import StoresConfig, connected
from kvstore.base import Store
from kvstore.urls import public_name

DESCRIPTION = """\
Removes every block that no lease holds from each of the stores; a Redis holds none. Asks before it
does, unless --yes is given. What was removed is computed again when it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearConfig(StoresConfig):
    """How sure."""

    yes: bool = option(False, "do not ask")


def main(argv: Sequence[str]) -> int:
    config = load(ClearConfig, argv, "kvrelay store clear", DESCRIPTION)
    cleared: dict[str, dict[str, int]] = {}
    for url in config.urls():
        with connected(url) as store:
            if not (config.yes or _sure(public_name(url), store, config.timeout)):
                tell(f"{public_name(url)}: nothing was removed")
                return 1
            removed = store.clear(config.timeout)
            left = store.stats(config.timeout).entries
        cleared[public_name(url)] = {"removed": removed, "left": left}
        if not config.json:
            say(f"{public_name(url)}: {removed:,} blocks removed, {left:,} left")
    if config.json:
        say(json.dumps(cleared, indent=2))
    return 0


def _sure(name: str, store: Store, timeout: float) -> bool:
    if not sys.stdin.isatty():
        raise Rejected("yes", "nobody is there to be asked: give --yes")
    entries = store.stats(timeout).entries
    sys.stderr.write(f"Remove {entries:,} blocks from {name}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
