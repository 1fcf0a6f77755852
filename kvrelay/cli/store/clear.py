"""``kvrelay store clear``: removes every block without a lease, after a confirmation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrelay.cli.screen import print_err, print_out
from kvrelay.cli.store.options import StoreSelection, browsing, connected
from kvrelay.config.reader import load, option
from kvrelay.errors import Rejected
from kvstore.base import Store
from kvstore.redis import SCHEMES as REDIS
from kvstore.urls import public_url

DESCRIPTION = """\
Removes every block without a lease from each of the stores; in a Redis no block has one. Asks for
confirmation unless --yes is given. Removed blocks are computed again when they are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearConfig(StoreSelection):
    """The stores to clear, and whether to ask."""

    yes: bool = option(False, "do not ask for confirmation")


def main(argv: Sequence[str]) -> int:
    config = load(ClearConfig, argv, "kvrelay store clear", DESCRIPTION)
    cleared: dict[str, dict[str, int]] = {}
    for url in config.urls():
        with connected(url) as store:
            if not (config.yes or _confirmed(url, store, config.timeout)):
                print_err(f"{public_url(url)}: nothing was removed")
                return 1
            removed = store.clear(config.timeout)
            left = _count_blocks(url, store, config.timeout)
        cleared[public_url(url)] = {"removed": removed, "left": left}
        if not config.json:
            print_out(f"{public_url(url)}: {removed:,} blocks removed, {left:,} left")
    if config.json:
        print_out(json.dumps(cleared, indent=2))
    return 0


def _count_blocks(url: str, store: Store, timeout: float) -> int:
    """The number of blocks, without the other keys of a Redis."""
    if urlsplit(url).scheme not in REDIS:
        return store.stats(timeout).entries
    with browsing(url) as browser:
        return sum(1 for _ in browser.list(timeout))


def _confirmed(url: str, store: Store, timeout: float) -> bool:
    if not sys.stdin.isatty():
        raise Rejected("yes", "cannot ask for confirmation without a terminal: give --yes")
    entries = _count_blocks(url, store, timeout)
    sys.stderr.write(f"Remove {entries:,} blocks from {public_url(url)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
