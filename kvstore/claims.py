"""What a writer claims before it sends blocks, and the check of the bytes against the claim.

A block is stored only if its name follows from what its header holds, so a writer cannot put a
wrong block in the place of another. Whether it is the block that a reader wants is checked by the
reader: a store does not know that.

A key is what the index knows a block by: its name, preceded by the prefix of its tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.block.header import Buffer, HeaderFields, fields_of
from kvrelay.block.name import NAME_BYTES, Digest, name_after, sha256
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.base import Offer, PutStatus


class Claim(NamedTuple):
    """A block that a writer wants to put: its name, its size in bytes, whether it is partial.

    The rest is as in ``kvstore.base.Offer``.
    """

    name: bytes
    size: int
    partial: bool
    first_block_hash: int | None = None
    parent: bytes | None = None
    detached: bool = False

    @property
    def needed(self) -> bytes | None:
        """The parent, without which no lookup finds this block; ``None`` if none is needed."""
        alone = self.detached or self.first_block_hash is not None
        return None if alone else self.parent


@dataclass(frozen=True, slots=True)
class Grant:
    """A verdict for each claim in order, and the ticket under which reserved blocks are committed.

    A verdict is ``RESERVED``, or the status with which the put of this block ends already.
    """

    ticket: int | None
    deadline: float
    verdicts: tuple[PutStatus, ...]


def claim_of(offer: Offer) -> Claim:
    """The claim of an offer."""
    first, parent = offer.first_block_hash, offer.parent
    return Claim(offer.name, offer.size, offer.partial, first, parent, offer.detached)


def name_of(key: bytes) -> bytes:
    """The block's name."""
    return key[-NAME_BYTES:]


def prefix_of(key: bytes) -> bytes:
    """The tenant's prefix; empty for the tenant without a name."""
    return key[:-NAME_BYTES]


def check_block(claim: Claim, data: Buffer, digest: Digest = sha256) -> HeaderFields:
    """The header of a whole block; ``Corrupt`` says what is wrong if it is not the one claimed."""
    view = memoryview(data)
    if view.nbytes != claim.size:
        raise Corrupt("length", f"{view.nbytes} bytes came and {claim.size} were claimed")
    header = check_header(name_of(claim.name), view, digest)
    verify_payload(header, view[header.length :])
    return header


def check_header(name: bytes, data: Buffer, digest: Digest = sha256) -> HeaderFields:
    """The header with which ``data`` begins; ``Corrupt`` unless it is that of block ``name``."""
    header = fields_of(data)
    check_name(name, header, digest)
    return header


def check_name(name: bytes, header: HeaderFields, digest: Digest = sha256) -> None:
    """``Corrupt`` unless the header says ``name``, and ``name`` follows from the header."""
    if header.name != name:
        raise Corrupt("name", f"{header.name.hex()} is in the header of {name.hex()}")
    derived = name_after(header.namespace, header.parent, header.words, digest)
    if derived != header.name:
        raise Corrupt("name", f"what the header holds is called {derived.hex()}")
