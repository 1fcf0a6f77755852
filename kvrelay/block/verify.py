"""Compares a block that was read with the block that was expected.

Every block that is read from a store passes this check before it becomes visible: a name may
collide, a store may be wrong, a byte may flip, a stranger may have written the block, and each of
these is a miss.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.block.header import (
    Buffer,
    ExpectedBlock,
    Header,
    HeaderFields,
    checksums,
    decode,
    encode_fields,
    fields_of,
    seal,
    stated_checksums,
)
from kvrelay.errors import Corrupt

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey


def verify(header: Header, expected: ExpectedBlock) -> None:
    """Raise ``Corrupt`` naming the first field of ``header`` that differs from ``expected``."""
    for field in ("namespace", "parent", "name", "count", "tokens", "dtype", "shape"):
        actual, wanted = getattr(header, field), getattr(expected, field)
        if actual != wanted:
            raise differing(field, actual, wanted)


def verify_payload(
    header: Header | HeaderFields, payload: Buffer, summed: Sequence[int] | None = None
) -> None:
    """Raise ``Corrupt`` unless ``payload`` has the length and checksums the header states.

    ``summed`` are the checksums of its heads if they were computed during the transfer.
    """
    if (nbytes := memoryview(payload).nbytes) != header.payload_bytes:
        raise differing("payload_bytes", nbytes, header.payload_bytes)
    actual = checksums(payload, header.heads) if summed is None else tuple(summed)
    if actual != header.checksums:
        raise wrong_head(actual, header.checksums)


def verify_block(
    raw: Buffer,
    expected: ExpectedBlock,
    payload: Buffer,
    summed: Sequence[int] | None = None,
    key: BlockKey | None = None,
) -> None:
    """Accept exactly the bytes that a holder of ``key`` writes for the expected block.

    Else ``Corrupt`` names the first field that is wrong. The time that the comparison takes does
    not depend on the bytes. A right tag proves the payload: with ``key`` its checksums are computed
    only to name the field.
    """
    size, heads = memoryview(payload).nbytes, expected.heads
    if key is None:
        summed = checksums(payload, heads) if summed is None else summed
        right = encode_fields(expected, size, summed)
    else:
        stated = stated_checksums(raw, heads)
        right = seal(encode_fields(expected, size, None), payload, stated, key)
    if hmac.compare_digest(raw, right):
        return
    header = decode(raw)
    verify(header, expected)
    verify_payload(header, payload, summed)
    raise Corrupt("tag", "the block was not written by this fleet")


def verify_tag(raw: bytes, payload: Buffer, key: BlockKey) -> None:
    """Raise ``Corrupt`` unless a holder of ``key`` wrote this block; its checksums are right."""
    if not hmac.compare_digest(raw, seal(raw, payload, fields_of(raw).checksums, key)):
        raise Corrupt("tag", "the block was not written by this fleet")


def wrong_head(actual: Sequence[int], stated: Sequence[int], first: int = 0) -> Corrupt:
    """The error that names the first head, counted from ``first``, of a wrong checksum."""
    pairs = enumerate(zip(actual, stated, strict=True), first)
    head, (found, wanted) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
    return Corrupt("payload_checksum", f"head {head}: found {found}, expected {wanted}")


Value = bytes | int | str | tuple[int, ...]


def differing(field: str, actual: Value, expected: Value) -> Corrupt:
    """The error of a field that is not the expected one."""
    return Corrupt(field, f"found {_short(actual)}, expected {_short(expected)}")


def _short(value: Value) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 24 else text[:24] + "..."
