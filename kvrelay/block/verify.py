"""Compares a block that was read with the block that was expected.

Every block that is read from a store passes this check before it becomes visible: a name may
collide, a store may be wrong, a byte may flip, and each of these is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.block.header import Buffer, Header, HeaderFields, checksum, decode, encode_fields
from kvrelay.errors import Corrupt


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """The block a reader expects: a header without the payload's length and checksum."""

    namespace: bytes
    parent: bytes
    name: bytes
    tokens: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


def verify(header: Header, expected: ExpectedBlock) -> None:
    """Raise ``Corrupt`` naming the first field of ``header`` that differs from ``expected``."""
    _same("namespace", header.namespace, expected.namespace)
    _same("parent", header.parent, expected.parent)
    _same("name", header.name, expected.name)
    _same("count", header.count, len(expected.tokens))
    _same("tokens", header.tokens, expected.tokens)
    _same("dtype", header.dtype, expected.dtype)
    _same("shape", header.shape, expected.shape)


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
    if raw == encode_fields(
        expected.namespace,
        expected.parent,
        expected.name,
        expected.tokens,
        expected.dtype,
        expected.shape,
        nbytes,
        actual,
    ):
        return
    header = decode(raw)
    verify(header, expected)
    verify_payload(header, payload, actual)


Value = bytes | int | str | tuple[int, ...]


def _same(field: str, actual: Value, expected: Value) -> None:
    if actual != expected:
        raise _other(field, actual, expected)


def _other(field: str, actual: Value, expected: Value) -> Corrupt:
    return Corrupt(field, f"found {_short(actual)}, expected {_short(expected)}")


def _short(value: Value) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 24 else text[:24] + "..."
