"""The check before a block is kept: is it, as bytes, what it is said to be?

Its name must follow from what its header holds, so nobody can put a wrong block in the place of
another. Whether it is what a reader wants is the reader's question; a store does not know that.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Corrupt
from kvblock.header import Buffer, Header, decode, header_bytes
from kvblock.name import Digest, child_name, sha256
from kvblock.verify import verify_payload
from kvstore.book.keys import name_of
from kvstore.records import Claim


@dataclass(frozen=True, slots=True)
class Summed:
    """``checksum`` of a block's bytes from ``start`` on, computed as they came."""

    start: int
    checksum: int


def check_block(
    claim: Claim, data: Buffer, digest: Digest = sha256, summed: Summed | None = None
) -> Header:
    """The header; ``Corrupt`` names the field unless ``data`` is a whole block of that name."""
    view = memoryview(data)
    if view.nbytes != claim.size:
        raise Corrupt("length", f"{view.nbytes} bytes came and {claim.size} were claimed")
    header = decode(view)
    check_name(name_of(claim.name), header, digest)
    start = header_bytes(header.count)
    known = summed.checksum if summed is not None and summed.start == start else None
    verify_payload(header, view[start:], known)
    return header


def check_name(name: bytes, header: Header, digest: Digest = sha256) -> None:
    """``Corrupt`` unless a block with this header is called ``name``, and rightly."""
    if header.name != name:
        raise Corrupt("name", f"{header.name.hex()} is in the header of {name.hex()}")
    true = child_name(header.namespace, header.parent, header.tokens, digest)
    if true != header.name:
        raise Corrupt("name", f"what the header holds is called {true.hex()}")
