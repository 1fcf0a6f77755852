"""The check before a block is kept: is it, as bytes, what it is said to be?

Its name must follow from what its header holds, so nobody can put a wrong block in the place of
another. Whether it is what a reader wants is the reader's question; a store does not know that.
"""

from __future__ import annotations

from kvrelay.block.header import Buffer, HeaderFields, fields_of, header_bytes
from kvrelay.block.name import Digest, name_after, sha256
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.claims import Claim
from kvstore.keys import name_of


def check_block(claim: Claim, data: Buffer, digest: Digest = sha256) -> HeaderFields:
    """What its header says; ``Corrupt`` unless it is a whole block of that name: what is wrong."""
    view = memoryview(data)
    if view.nbytes != claim.size:
        raise Corrupt("length", f"{view.nbytes} bytes came and {claim.size} were claimed")
    header = check_header(name_of(claim.name), view, digest)
    verify_payload(header, view[header_bytes(header.positions) :])
    return header


def check_header(name: bytes, data: Buffer, digest: Digest = sha256) -> HeaderFields:
    """The same for the header alone, with which ``data`` begins."""
    header = fields_of(data)
    check_name(name, header, digest)
    return header


def check_name(name: bytes, header: HeaderFields, digest: Digest = sha256) -> None:
    """``Corrupt`` unless a block with this header is called ``name``, and rightly."""
    if header.name != name:
        raise Corrupt("name", f"{header.name.hex()} is in the header of {name.hex()}")
    true = name_after(header.namespace, header.parent, header.words, digest)
    if true != header.name:
        raise Corrupt("name", f"what the header holds is called {true.hex()}")
