"""Compares a block that was read with the block that was expected.

Every block that is read from a store passes this check before it becomes visible: a name may
collide, a store may be wrong, a byte may flip, and each of these is a miss.
"""

from __future__ import annotations

from kvrelay.block.header import (
    Buffer,
    ExpectedBlock,
    Header,
    HeaderFields,
    checksum,
    decode,
    encode_fields,
)
from kvrelay.errors import Corrupt


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
    raw: Buffer, expected: ExpectedBlock, payload: Buffer, summed: int | None = None
) -> None:
    """Both checks for a header's bytes: ``Corrupt`` names the first field that is wrong.

    A correct header has exactly the bytes that would be written for the expected block, so they are
    compared as a whole first: that takes a third of the time, and most blocks need no more.
    """
    actual = checksum(payload) if summed is None else summed
    nbytes = memoryview(payload).nbytes
    if raw == encode_fields(expected, nbytes, actual):
        return
    header = decode(raw)
    verify(header, expected)
    verify_payload(header, payload, actual)


Value = bytes | int | str | tuple[int, ...]


def _other(field: str, actual: Value, expected: Value) -> Corrupt:
    return Corrupt(field, f"found {_short(actual)}, expected {_short(expected)}")


def _short(value: Value) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 24 else text[:24] + "..."
