"""What the catalog is asked and what it answers: frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from kvrelay.usage import Miss

V = TypeVar("V")


class ClaimStatus(Enum):
    """What became of a claim."""

    __hash__ = (
        object.__hash__
    )  # looked up for every block; the library's own takes ten times as long

    RESERVED = "reserved"  # send it
    EXISTS = "exists"
    PENDING = "pending"  # another writer is at it
    NO_ROOM = "no room"


class Claim(NamedTuple):
    """A block somebody wants to put: its name, its bytes in all, and whether it is partial.

    ``opening`` is ``kvblock.Namer.opening`` of a sequence's first block.
    """

    name: bytes
    size: int
    partial: bool
    opening: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Verdicts in the order of the claims, and the ticket to commit the reserved ones with."""

    ticket: int | None
    deadline: float
    verdicts: tuple[ClaimStatus, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """A block to look for if exactly the first ``after`` names lead."""

    after: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """The leading run found: ``sizes`` of its blocks in order, the tail's last if one was taken.

    ``missing`` says why the first block after them is not there, ``None`` if all are.
    """

    lead: int
    tail: int | None
    sizes: tuple[int, ...]
    lease: int | None
    deadline: float
    missing: Miss | None = None


@dataclass(frozen=True, slots=True)
class IndexSurvey:
    """``sizes`` of the blocks asked about, ``None`` for those absent; held by ``lease``.

    ``misses`` says why those are, ``opening`` whether one of the openings is there.
    """

    sizes: tuple[int | None, ...]
    lease: int | None
    deadline: float
    misses: tuple[Miss | None, ...] = ()
    opening: bool = False


@dataclass(frozen=True, slots=True)
class Located(Generic[V]):
    """Size and value of each block asked for, ``None`` for those absent; held by ``lease``."""

    blocks: tuple[tuple[int, V] | None, ...]
    lease: int | None
