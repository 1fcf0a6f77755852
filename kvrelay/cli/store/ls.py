"""``kvrelay store ls [PREFIX]``: the blocks of a store, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvrelay.cli.screen import paint, print_err, print_out, table
from kvrelay.cli.store.options import StoreSelection, as_json, browsing, places
from kvrelay.config.reader import load, option
from kvrelay.config.values import show_bytes
from kvstore.base import ListedBlock
from kvstore.client.browse import SHOWN, blocks_by_digits
from kvstore.urls import public_url

DESCRIPTION = """\
Lists the blocks of a store: name, tokens, bytes, full or partial, leases, tenant and place. PREFIX
is the beginning of the names to list, in hexadecimal digits. A Redis is read by SCAN; it reports
neither leases nor which blocks are partial."""
HEAD = ("name", "tokens", "bytes", "kind", "leases", "tenant", "lies in")
RIGHT = frozenset({1, 2, 4})
PAGE = 1000
"""Rows of one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LsConfig(StoreSelection):
    """The blocks to list."""

    prefix: str = option("", "first digits of the names", metavar="PREFIX", positional=True)
    limit: int = option(0, "list at most this many blocks; 0 lists all", low=0)
    long: bool = option(False, "print every digit of a name")


def main(argv: Sequence[str]) -> int:
    config = load(LsConfig, argv, "kvrelay store ls", DESCRIPTION)
    for url in config.urls():
        with browsing(url) as browser:
            found = blocks_by_digits(browser, config.prefix, config.timeout, config.limit)
            if config.json:
                for listed in found:
                    print_out(json.dumps({"store": public_url(url), **as_json(listed)}))
            else:
                _show(public_url(url), found, config)
    return 0


def _show(name: str, found: Iterator[ListedBlock], config: LsConfig) -> None:
    print_out(paint(name, "bold"))
    count = nbytes = 0
    while page := list(islice(found, PAGE)):
        print_out(table(HEAD, [cells(listed, config.long) for listed in page], RIGHT))
        count, nbytes = count + len(page), nbytes + sum(listed.size for listed in page)
    print_err(f"  {count:,} blocks, {show_bytes(nbytes)}")


def cells(listed: ListedBlock, long: bool) -> list[str]:
    """One row of the table."""
    return [
        listed.name.hex() if long else listed.name.hex()[:SHOWN],
        str(listed.tokens),
        f"{listed.size:,}",
        "partial" if listed.partial else "full",
        str(listed.leases),
        listed.tenant or "-",
        places(listed),
    ]
