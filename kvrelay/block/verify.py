"""The comparison between a block that came and the block that was wanted.

Nothing that was read from a store becomes visible before it went through here: a name may collide,
a store may be wrong, a byte may flip, and each of these is a miss and not an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.block.header import Buffer, Header, HeaderFields, checksum, decode, encoded
from kvrelay.errors import Corrupt


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """The block a reader asks for: all of a header but what only the payload can tell."""

    namespace: bytes
    parent: bytes
    name: bytes
    tokens: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]


def verify(header: Header, wanted: ExpectedBlock) -> None:
    """Raise ``Corrupt`` naming the first field of ``header`` which is not as wanted."""
    _same("namespace", header.namespace, wanted.namespace)
    _same("parent", header.parent, wanted.parent)
    _same("name", header.name, wanted.name)
    _same("count", header.count, len(wanted.tokens))
    _same("tokens", header.tokens, wanted.tokens)
    _same("dtype", header.dtype, wanted.dtype)
    _same("shape", header.shape, wanted.shape)


def verify_payload(
    header: Header | HeaderFields, payload: Buffer, summed: int | None = None
) -> None:
    """Raise ``Corrupt`` unless ``payload`` has the length and checksum the header states.

    ``summed`` is the checksum of ``payload``, where it was computed as the bytes came.
    """
    if (nbytes := memoryview(payload).nbytes) != header.payload_bytes:
        raise _other("payload_bytes", nbytes, header.payload_bytes)
    found = checksum(payload) if summed is None else summed
    if found != header.payload_checksum:
        raise _other("payload_checksum", found, header.payload_checksum)


def verify_block(
    raw: Buffer, wanted: ExpectedBlock, payload: Buffer, summed: int | None = None
) -> None:
    """All of the above for a header's bytes: ``Corrupt`` names the first field that is wrong.

    A header that is right has the very bytes that would be written for what is wanted, so they are
    compared as a whole first: a third of the time, and most blocks need no more.
    """
    found = checksum(payload) if summed is None else summed
    nbytes = memoryview(payload).nbytes
    if raw == encoded(
        wanted.namespace,
        wanted.parent,
        wanted.name,
        wanted.tokens,
        wanted.dtype,
        wanted.shape,
        nbytes,
        found,
    ):
        return
    header = decode(raw)
    verify(header, wanted)
    verify_payload(header, payload, found)


Value = bytes | int | str | tuple[int, ...]


def _same(field: str, found: Value, wanted: Value) -> None:
    if found != wanted:
        raise _other(field, found, wanted)


def _other(field: str, found: Value, wanted: Value) -> Corrupt:
    return Corrupt(field, f"found {_short(found)}, wanted {_short(wanted)}")


def _short(value: Value) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 24 else text[:24] + "..."
