"""Any store by its URL, as those see it who look after it: what is there, and one block of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit

from kvrelay.block.header import Header
from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import NotFound, Rejected
from kvrelay.rpc.address import Address
from kvstore.client.admin import ListedBlock, StoreAdmin
from kvstore.client.connect import connect
from kvstore.redis import SCHEMES as REDIS
from kvstore.redis import settings_for
from kvstore.redis.browser import RedisBrowser

SHOWN = 12
"""Digits of a name that tell blocks apart, as a rule."""

_DIGITS = re.compile("[0-9a-fA-F]*")


class Browser(Protocol):
    """One store. Timeouts are in seconds."""

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """Every block whose name begins with ``prefix``; ``limit`` 0 is none."""

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        """One block and its header; ``NotFound`` if it is not there."""

    def close(self) -> None:
        """Give up the connection."""


def browse(url: str) -> Browser:
    """For one URL, as ``connect`` takes it."""
    connect(url).close()  # says what is wrong with the URL
    parts = urlsplit(url)
    if parts.scheme in ("kvrelay", "kvrelays"):
        return StoreAdmin(str(Address.parse(parts.netloc)))
    if parts.scheme in REDIS:
        return RedisBrowser(settings_for(url))
    raise Rejected("store", "memory:// lives in one process, and this is another one")


def blocks_by_digits(
    browser: Browser, digits: str, timeout: float, limit: int = 0
) -> Iterator[ListedBlock]:
    """The blocks whose names in hexadecimal begin with ``digits``."""
    if not _DIGITS.fullmatch(digits):
        raise Rejected("name", f"{digits!r} is no hexadecimal number")
    prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
    if len(digits) > 2 * NAME_BYTES:
        raise Rejected("name", f"{digits!r} has more than {2 * NAME_BYTES} digits")
    found = 0
    for listed in browser.list(timeout, prefix, 0 if len(digits) % 2 else limit):
        if listed.name.hex().startswith(digits.lower()):
            yield listed
            found += 1
            if found == limit:
                return


def resolve_digits(browser: Browser, digits: str, timeout: float) -> ListedBlock:
    """The one block whose name begins with ``digits``; ``NotFound``, or ``Rejected`` if several."""
    if not digits:
        raise Rejected("name", "is empty: give the first digits of one")
    found = list(blocks_by_digits(browser, digits, timeout, SHOWN))
    if not found:
        raise NotFound(f"there is no block {digits}")
    if len(found) > 1:
        names = ", ".join(listed.name.hex()[: len(digits) + 6] for listed in found[:4])
        more = ", ..." if len(found) > 4 else ""
        raise Rejected("name", f"{digits} begins the names of several blocks: {names}{more}")
    return found[0]
