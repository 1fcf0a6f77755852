"""The namespace: everything that must be equal before two workers may share a KV block.

Its digest is part of every name and every header, so a lookup cannot find blocks of another model,
revision, dtype, layout, block size, format, numeric profile or tenant.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from kvrelay.errors import Rejected

FORMAT_VERSION = 3
"""Version of naming, header and payload layout; raise it when any of them changes."""

LAYOUT = "block,head,layer,k|v,position,dim"
"""The order of the dimensions of a payload."""

_DOMAIN = b"kvrelay.namespace.v1"


def _framed(value: bytes) -> bytes:
    """Length first, so that no two lists of fields give the same bytes."""
    return len(value).to_bytes(8, "little") + value


@dataclass(frozen=True)
class Namespace:
    """What a block depends on besides its tokens.

    ``numerics`` is the numeric profile of the worker that computes it; empty (``--numerics loose``)
    for blocks that workers of any profile share.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    block_size: int
    format_version: int = FORMAT_VERSION
    numerics: str = ""
    fleet_key_id: bytes = b""  # of the key that signs the blocks; empty: they are not signed
    tenant_salt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        for name in ("block_size", "format_version"):
            if not 1 <= getattr(self, name) < 1 << 32:
                raise Rejected(name, f"{getattr(self, name)} is not in 1 .. 2**32 - 1")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the name and value of every field; 32 bytes. It hides the salt."""
        parts = [_framed(_DOMAIN)]
        for each in fields(self):
            parts += _framed(each.name.encode()), _framed(_encoded(getattr(self, each.name)))
        return hashlib.sha256(b"".join(parts)).digest()

    @cached_property
    def family(self) -> bytes:
        """The digest of the namespace without profile and tenant: equal up to rounding."""
        return replace(self, numerics="", tenant_salt=b"").digest

    def of_tenant(self, salt: bytes) -> Namespace:
        """The namespace of the tenant with this salt."""
        return replace(self, tenant_salt=salt) if salt else self


def _encoded(value: str | int | bytes) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(8, "little")
    return value.encode() if isinstance(value, str) else value
