"""A range of a block's KV heads: where its bytes are, and the check of a reader that has no others.

The payload is head-major, so a rank of a tensor-parallel worker reads the header and one range.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.block.header import (
    Buffer,
    ExpectedBlock,
    checksums,
    decode,
    encode_fields,
    header_bytes,
    payload_bytes,
    seal_header,
    stated_checksums,
    stated_tags,
)
from kvrelay.block.verify import differing, verify, wrong_head
from kvrelay.errors import Corrupt, Rejected

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads ``first`` to ``last`` (exclusive) of ``block``, which has all heads of the model."""

    block: ExpectedBlock
    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.block.heads:
            raise Rejected(
                "heads", f"[{self.first}, {self.last}) is not a range of {self.block.heads} heads"
            )

    @property
    def header_length(self) -> int:
        """Bytes of the header, which begins the stored block."""
        return header_bytes(self.block.count, self.block.heads)

    @property
    def offset(self) -> int:
        """Where the range begins in the stored block, in bytes."""
        return self.header_length + self.first * self._head_bytes

    @property
    def length(self) -> int:
        """Bytes of the range: ``[last - first, *block.shape[1:]]``."""
        return (self.last - self.first) * self._head_bytes

    @property
    def _head_bytes(self) -> int:
        return payload_bytes(self.block.dtype, self.block.shape[1:])

    def verify(self, raw: Buffer, part: Buffer, key: BlockKey | None = None) -> None:
        """Accept exactly the header and the bytes that a holder of ``key`` writes for this range.

        ``raw`` is the header, ``part`` the range. Else ``Corrupt`` names the first wrong field.
        """
        if (nbytes := memoryview(part).nbytes) != self.length:
            raise differing("payload_bytes", nbytes, self.length)
        self._verify_header(raw, key)
        heads, here = self.last - self.first, slice(self.first, self.last)
        stated = stated_checksums(raw, self.block.heads)[here]
        if key is not None:
            tags = stated_tags(raw, self.block.heads)[here]
            if hmac.compare_digest(b"".join(tags), b"".join(key.head_tags(part, heads))):
                return
        if (actual := checksums(part, heads)) != stated:
            raise wrong_head(actual, stated, self.first)
        if key is not None:
            raise Corrupt("tag", "the heads were not written by this fleet")

    def _verify_header(self, raw: Buffer, key: BlockKey | None) -> None:
        block, heads = self.block, self.block.heads
        size = payload_bytes(block.dtype, block.shape)
        tags = () if key is None else stated_tags(raw, heads)
        right = encode_fields(block, size, stated_checksums(raw, heads), tags)
        if key is not None:
            right = seal_header(right, key)
        if not hmac.compare_digest(raw, right):
            verify(decode(raw), block)
            raise Corrupt("tag", "the block was not written by this fleet")
