"""URLs of stores as text: a list of them, and the name of one that may be shown to anybody."""

from __future__ import annotations

import re

_BETWEEN = re.compile(r"\s*,\s*(?=[a-z][a-z0-9+.-]*://)")


def urls_of(text: str) -> list[str]:
    """The URLs of a list such as ``kvrelay://a:1,redis://b:2``; a comma within one stays."""
    return _BETWEEN.split(text.strip())


def public_name(url: str) -> str:
    """A URL without what is nobody's business: user, password and parameters.

    Taken apart at its last ``@``, so that a password with a ``/`` or ``?`` in it is not shown.
    """
    head, between, rest = url.rpartition("@")[2].rpartition("://")
    scheme = head or url.partition("://")[0]
    return f"{scheme}{between or '://'}{rest.partition('?')[0].rstrip('/')}"


def public_names(text: str) -> str:
    """The same for a list."""
    return ",".join(map(public_name, urls_of(text))) if text else ""
