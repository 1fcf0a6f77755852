"""URLs of stores: lists of them, and URLs without secrets."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from kvrelay.errors import Rejected

STORE_PARAMETERS = ("db", "prefix")
"""Parameters that tell several stores at one address apart."""

_BETWEEN = re.compile(r"\s*,\s*(?=[a-z][a-z0-9+.-]*://)")


def split_urls(text: str) -> list[str]:
    """The URLs of a list such as ``kvrelay://a:1,redis://b:2``; a comma within a URL stays."""
    return _BETWEEN.split(text.strip())


def public_url(url: str) -> str:
    """A URL without user, password and parameters other than ``STORE_PARAMETERS``.

    It is split at its last ``@``, so that a password with a ``/`` or ``?`` in it is not shown.
    """
    head, _, rest = url.rpartition("@")[2].rpartition("://")
    scheme = (head or url.partition("://")[0]) + "://" if "://" in url else ""
    where, _, query = rest.partition("?")
    place = "&".join(
        part for part in query.split("&") if part.partition("=")[0] in STORE_PARAMETERS
    )
    return f"{scheme}{where.rstrip('/')}" + (f"?{place}" if place else "")


def public_urls(text: str) -> str:
    """``public_url`` for a list."""
    return ",".join(map(public_url, split_urls(text))) if text else ""


def standalone_url(url: str) -> str:
    """A URL of a list by itself, without the parameters that describe its role in the list."""
    head, question, query = url.partition("?")
    kept = [part for part in query.split("&") if part.partition("=")[0] not in ("write", "promote")]
    return head + question + "&".join(kept) if any(kept) else head


def query_parameters(query: str) -> dict[str, str]:
    """The parameters after the ``?``; ``Rejected`` if one is given twice or has no value."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            raise Rejected(name, "has no value: give it one, or leave it out")
        if name in found:
            raise Rejected(name, "is given twice")
        found[name] = value
    return found
