"""Blocks a group at a time: so many bytes, or so many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What has a ``size`` in bytes."""

    @property
    def size(self) -> int:
        """In bytes."""


S = TypeVar("S", bound=Sized)


def size_batches(items: Iterable[S], most_bytes: int, most: int) -> Iterator[list[S]]:
    """In order. One that is larger than ``most_bytes`` is a group by itself."""
    group: list[S] = []
    size = 0
    for item in items:
        if group and (size + item.size > most_bytes or len(group) == most):
            yield group
            group, size = [], 0
        group.append(item)
        size += item.size
    if group:
        yield group
