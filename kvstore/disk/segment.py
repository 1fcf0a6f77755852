"""A segment file: blocks are appended to it, read from it, and found after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrelay.block import header as blocks
from kvrelay.errors import Corrupt
from kvstore.disk.record import (
    HEAD_BYTES,
    RecordHead,
    decode_head,
    encode_head,
    padding,
    record_bytes,
)
from kvstore.disk.segment_index import DiskLocation

SCAN_BYTES = 1024
"""Bytes read first of each record: its head and, in most cases, the whole header of its block."""

_VECTORS = 1023  # IOV_MAX is 1024
_FIXED_BYTES = 16  # of a header, enough to know its length


class SegmentAppender:
    """Writes a new segment; ``end`` is the length of its complete records."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self.end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)

    def append(self, parts: Sequence[tuple[bytes, memoryview]]) -> list[int]:
        """Append blocks with their keys; returns the offset of each block.

        After an ``OSError`` the segment is as it was before.
        """
        start, offsets = self.end, []
        vectors: list[bytes | memoryview] = []
        for key, data in parts:
            offsets.append(start + HEAD_BYTES)
            vectors += (encode_head(RecordHead(key, len(data))), data, padding(len(data)))
            start += record_bytes(len(data))
        try:
            self._write(vectors)
        except OSError:
            os.ftruncate(self._fd, self.end)
            raise
        self.end = start
        return offsets

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, vectors: list[bytes | memoryview]) -> None:
        at = self.end
        while vectors:
            wrote = os.pwritev(self._fd, vectors[:_VECTORS], at)
            at += wrote
            while vectors and wrote >= len(vectors[0]):
                wrote -= len(vectors.pop(0))
            if wrote:
                vectors[0] = memoryview(vectors[0])[wrote:]


def read_into(path: Path, offset: int, view: memoryview) -> None:
    """Fill ``view`` from a segment; ``Corrupt`` if the file is absent or too short."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Corrupt("segment", f"{path.name} does not exist") from error
    except OSError as error:
        raise Corrupt("segment", f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        while len(view):
            count = os.preadv(fd, [view], offset)
            if not count:
                raise Corrupt("segment", f"{path.name} ends {len(view)} bytes too early")
            view, offset = view[count:], offset + count
    except OSError as error:
        raise Corrupt("segment", f"{path.name} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


class SegmentScan:
    """Finds the blocks of a segment by their headers. ``damaged`` counts all other records.

    The scan ends at a damaged head: the start of the next record is unknown.
    """

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number
        self.damaged = 0
        self.end = 0

    def locations(self) -> Iterator[DiskLocation]:
        """The locations of blocks that are complete by the file's length."""
        with self._path.open("rb", buffering=0) as file:
            fd = file.fileno()
            size = os.fstat(fd).st_size
            while self.end < size:
                try:
                    head = decode_head(os.pread(fd, SCAN_BYTES, self.end))
                    if self.end + HEAD_BYTES + head.size > size:
                        raise Corrupt("record", "is longer than its file")
                except Corrupt:
                    self.damaged += 1
                    return
                offset = self.end + HEAD_BYTES
                self.end += record_bytes(head.size)
                try:
                    yield self._location(fd, head, offset)
                except Corrupt:
                    self.damaged += 1

    def _location(self, fd: int, head: RecordHead, offset: int) -> DiskLocation:
        data = os.pread(fd, SCAN_BYTES - HEAD_BYTES, offset)
        if len(data) < _FIXED_BYTES:
            raise Corrupt("header", "is missing")
        length = blocks.stated_length(data)
        if len(data) < length <= min(head.size, blocks.LONGEST):
            data = os.pread(fd, length, offset)
        header = blocks.decode(data)
        if length + header.payload_bytes != head.size or not head.key.endswith(header.name):
            raise Corrupt("record", "its head and its block's header do not agree")
        prefix = head.key[: -len(header.name)]
        parent = prefix + header.parent
        return DiskLocation(head.key, parent, head.size, header.count, self._number, offset)
