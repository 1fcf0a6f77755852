"""The check before a block is kept: is it, as bytes, what it is said to be?

Its name must follow from what its header holds, so nobody can put a wrong block in the place of
another. Whether it is what a reader wants is the reader's question; a store does not know that.
"""

from __future__ import annotations

from common.errors import Corrupt
from kvblock.header import Buffer, Fields, fields_of, header_bytes
from kvblock.name import Digest, name_after, sha256
from kvblock.verify import verify_payload
from kvstore.book.keys import name_of
from kvstore.records import Claim


def check_block(claim: Claim, data: Buffer, digest: Digest = sha256) -> Fields:
    """What its header says; ``Corrupt`` unless it is a whole block of that name: what is wrong."""
    view = memoryview(data)
    if view.nbytes != claim.size:
        raise Corrupt("length", f"{view.nbytes} bytes came and {claim.size} were claimed")
    header = check_header(name_of(claim.name), view, digest)
    verify_payload(header, view[header_bytes(header.positions) :])
    return header


def check_header(name: bytes, data: Buffer, digest: Digest = sha256) -> Fields:
    """The same for the header alone, with which ``data`` begins."""
    header = fields_of(data)
    check_name(name, header, digest)
    return header


def check_name(name: bytes, header: Fields, digest: Digest = sha256) -> None:
    """``Corrupt`` unless a block with this header is called ``name``, and rightly."""
    if header.name != name:
        raise Corrupt("name", f"{header.name.hex()} is in the header of {name.hex()}")
    true = name_after(header.namespace, header.parent, header.words, digest)
    if true != header.name:
        raise Corrupt("name", f"what the header holds is called {true.hex()}")
