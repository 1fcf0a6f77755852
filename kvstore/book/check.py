"""The check before a block is kept: is it, as bytes, what it is said to be?

Its name must follow from what its header holds, so nobody can put a wrong block in the place of
another. Whether it is what a reader wants is the reader's question; a store does not know that.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Corrupt
from kvblock.header import Buffer, Fields, fields_of, header_bytes
from kvblock.name import Digest, name_after, sha256
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
) -> Fields:
    """What its header says; ``Corrupt`` unless it is a whole block of that name: what is wrong."""
    view = memoryview(data)
    if view.nbytes != claim.size:
        raise Corrupt("length", f"{view.nbytes} bytes came and {claim.size} were claimed")
    header = fields_of(view)
    check_name(name_of(claim.name), header, digest)
    start = header_bytes(header.positions)
    known = summed.checksum if summed is not None and summed.start == start else None
    verify_payload(header, view[start:], known)
    return header


def check_name(name: bytes, header: Fields, digest: Digest = sha256) -> None:
    """``Corrupt`` unless a block with this header is called ``name``, and rightly."""
    if header.name != name:
        raise Corrupt("name", f"{header.name.hex()} is in the header of {name.hex()}")
    true = name_after(header.namespace, header.parent, header.words, digest)
    if true != header.name:
        raise Corrupt("name", f"what the header holds is called {true.hex()}")
