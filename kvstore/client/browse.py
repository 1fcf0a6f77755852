"""Lists and finds the blocks of any store by its URL, for operators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import NotFound, Rejected
from kvrelay.rpc.address import Address
from kvstore.base import ListedBlock, StoreBrowser
from kvstore.client.admin import StoreAdmin
from kvstore.client.connect import connect
from kvstore.redis import SCHEMES as REDIS
from kvstore.redis import settings_for
from kvstore.redis.browser import RedisBrowser

SHOWN = 12
"""Digits of a name that are shown: usually enough to identify a block."""

_DIGITS = re.compile("[0-9a-fA-F]*")


def browse(url: str) -> StoreBrowser:
    """A browser of the store at one URL, as ``connect`` takes it."""
    connect(url).close()  # raises if the URL is wrong
    parts = urlsplit(url)
    if parts.scheme in ("kvrelay", "kvrelays"):
        return StoreAdmin(str(Address.parse(parts.netloc)))
    if parts.scheme in REDIS:
        return RedisBrowser(settings_for(url))
    raise Rejected("store", "memory:// exists only within the process that uses it")


def blocks_by_digits(
    browser: StoreBrowser, digits: str, timeout: float, limit: int = 0
) -> Iterator[ListedBlock]:
    """The blocks whose names in hexadecimal begin with ``digits``."""
    if not _DIGITS.fullmatch(digits):
        raise Rejected("name", f"{digits!r} is not a hexadecimal number")
    prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
    if len(digits) > 2 * NAME_BYTES:
        raise Rejected("name", f"{digits!r} has more than {2 * NAME_BYTES} digits")
    shown = 0
    for listed in browser.list(timeout, prefix, 0 if len(digits) % 2 else limit):
        if listed.name.hex().startswith(digits.lower()):
            yield listed
            shown += 1
            if shown == limit:
                return


def resolve_digits(browser: StoreBrowser, digits: str, timeout: float) -> ListedBlock:
    """The one block whose name begins with ``digits``; ``NotFound``, or ``Rejected`` if several."""
    if not digits:
        raise Rejected("name", "is empty: give the first digits of a block's name")
    matches = list(blocks_by_digits(browser, digits, timeout, SHOWN))
    if not matches:
        raise NotFound(f"there is no block {digits}")
    if len(matches) > 1:
        names = ", ".join(listed.name.hex()[: len(digits) + 6] for listed in matches[:4])
        more = ", ..." if len(matches) > 4 else ""
        raise Rejected("name", f"{digits} begins the names of several blocks: {names}{more}")
    return matches[0]
