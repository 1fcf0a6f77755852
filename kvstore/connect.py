"""From a URL to a store."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from common.errors import Rejected
from kvstore.base import Store
from kvstore.breaker import Breaker
from kvstore.memory import MemoryStore
from kvstore.remote import RemoteStore
from rpc.address import Address


def _memory(rest: str) -> Store:
    return MemoryStore(rest)


def _kvrelay(rest: str) -> Store:
    return Breaker(RemoteStore(str(Address.parse(rest))))


SCHEMES: dict[str, Callable[[str], Store]] = {"memory": _memory, "kvrelay": _kvrelay}


def connect(url: str) -> Store:
    """The store at ``url``; ``Rejected`` for the field ``store`` if it names none.

    Nothing is sent yet: a store that is not there is found out, and waited for, by its users.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise Rejected("store", f"{url!r} has none of the schemes {known}")
    try:
        return SCHEMES[parts.scheme](parts.netloc)
    except Rejected as error:
        raise Rejected("store", f"{url!r}: {error.message}") from error
