"""Compares a block that was read with the block that was expected.

Every block that is read from a store passes this check before it becomes visible: a name may
collide, a store may be wrong, a byte may flip, a stranger may have written the block, and each of
these is a miss.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from kvrelay.block.header import (
    Buffer,
    ExpectedBlock,
    Header,
    HeaderFields,
    checksum,
    decode,
    encode_fields,
    fields_of,
    seal,
    stated_checksum,
)
from kvrelay.errors import Corrupt

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey


def verify(header: Header, expected: ExpectedBlock) -> None:
    """Raise ``Corrupt`` naming the first field of ``header`` that differs from ``expected``."""
    for field in ("namespace", "parent", "name", "count", "tokens", "dtype", "shape"):
        actual, wanted = getattr(header, field), getattr(expected, field)
        if actual != wanted:
            raise _other(field, actual, wanted)


def verify_payload(
    header: Header | HeaderFields, payload: Buffer, summed: int | None = None
) -> None:
    """Raise ``Corrupt`` unless ``payload`` has the length and checksum the header states.

    ``summed`` is the checksum of ``payload`` if it was computed during the transfer.
    """
    if (nbytes := memoryview(payload).nbytes) != header.payload_bytes:
        raise _other("payload_bytes", nbytes, header.payload_bytes)
    actual = checksum(payload) if summed is None else summed
    if actual != header.payload_checksum:
        raise _other("payload_checksum", actual, header.payload_checksum)


def verify_block(
    raw: Buffer,
    expected: ExpectedBlock,
    payload: Buffer,
    summed: int | None = None,
    key: BlockKey | None = None,
) -> None:
    """Accept exactly the bytes that a holder of ``key`` writes for the expected block.

    Else ``Corrupt`` names the first field that is wrong. The time that the comparison takes does
    not depend on the bytes. A right tag proves the payload: with ``key`` its checksum is computed
    only to name the field.
    """
    size = memoryview(payload).nbytes
    if key is not None:
        stated = stated_checksum(raw)
        right = seal(encode_fields(expected, size, stated), payload, stated, key)
    else:
        summed = checksum(payload) if summed is None else summed
        right = encode_fields(expected, size, summed)
    if hmac.compare_digest(raw, right):
        return
    header = decode(raw)
    verify(header, expected)
    verify_payload(header, payload, summed)
    raise Corrupt("tag", "the block was not written by this fleet")


def verify_tag(raw: bytes, payload: Buffer, key: BlockKey) -> None:
    """Raise ``Corrupt`` unless a holder of ``key`` wrote this block; its checksums are right."""
    if not hmac.compare_digest(raw, seal(raw, payload, fields_of(raw).payload_checksum, key)):
        raise Corrupt("tag", "the block was not written by this fleet")


Value = bytes | int | str | tuple[int, ...]


def _other(field: str, actual: Value, expected: Value) -> Corrupt:
    return Corrupt(field, f"found {_short(actual)}, expected {_short(expected)}")


def _short(value: Value) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 24 else text[:24] + "..."
