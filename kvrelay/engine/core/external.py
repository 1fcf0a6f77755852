"""What the engine asks of external KV: four calls, two events, and the frozen values they carry.

The protocol lives with the engine that makes the calls; implementations are in ``connector/``.
Everything here is standard library only. A lookup writes nothing; a load and a save each hold
references on their blocks until their event comes back, whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.usage import Miss


@dataclass(frozen=True, slots=True)
class Query:
    """A question about one waiting request: how many tokens after ``local`` are there outside?

    ``tokens`` are the request's ``L`` token ids and ``names`` the names of its full blocks, in
    order; both are the request's own lists, to be read and never kept or changed. ``local`` is the
    number of leading tokens found in this worker's pool, a multiple of the block size. ``space`` is
    as in ``kvrelay.engine.core.request.Order``.
    """

    request_id: str
    tokens: Sequence[int]
    names: Sequence[bytes]
    local: int
    space: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockContent:
    """One block of a transfer: the pool block it lies in, and what its content is.

    The content is ``len(tokens)`` positions, at most the block size; ``name`` commits to them and
    to ``parent``, the name of the block before (the namespace's root for the first).
    """

    block: int
    name: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """An order to fill positions ``[local, local + external)`` of a request from outside.

    ``tokens`` are all ``L`` of the request and ``names`` those of its full blocks. ``blocks`` are
    the pool blocks from position ``local`` on, one for each block of the range; whatever is
    written into them past ``local + external`` is overwritten later and does no harm.
    """

    request_id: str
    epoch: int
    local: int
    external: int
    tokens: tuple[int, ...]
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]
    space: bytes = b""


@dataclass(frozen=True, slots=True)
class Save:
    """An order to copy blocks out. ``serial`` tells the saves of one residency apart."""

    request_id: str
    epoch: int
    serial: int
    pieces: tuple[BlockContent, ...]
    space: bytes = b""

    @property
    def blocks(self) -> tuple[int, ...]:
        """The pool blocks that are read."""
        return tuple(piece.block for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended: the first ``valid`` of its ``external`` tokens are written and verified.

    ``missed`` says why there are no more, if there should have been. ``sources`` are the stores
    they came from, each with its number of tokens; two events are equal whoever gave the tokens.
    """

    request_id: str
    epoch: int
    valid: int
    missed: Miss | None = None
    sources: tuple[tuple[str, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Saved:
    """A save has ended: its first ``stored`` pieces are in the store (written now or before)."""

    request_id: str
    epoch: int
    serial: int
    stored: int


TransferEvent = Loaded | Saved


class Connector(Protocol):
    """External KV as one engine sees it. Every call returns at once; work is done elsewhere.

    The counterparts in vLLM's ``KVConnectorBase_V1`` are named with each method. Every ``load`` is
    answered by exactly one ``Loaded`` and every ``save`` by exactly one ``Saved``, within a
    deadline the connector keeps; the engine survives late, repeated, wrong and unknown ones.
    """

    def start(self, notify: Callable[[], None]) -> None:
        """Begin work; ``notify`` (thread-safe) is called when ``poll`` or a lookup has news."""

    def lookup(self, query: Query) -> int | None:
        """Tokens available after ``query.local``; ``None`` means ask again after a notify.

        vLLM: ``get_num_new_matched_tokens``.
        """

    def why(self, request_id: str) -> Miss | None:
        """Why the block after those that the last lookup found is not there.

        Asked once an admission, between its lookup and its load; ``None``: nothing was asked.
        """

    def load(self, load: Load) -> None:
        """Start to fill blocks. vLLM: ``update_state_after_alloc`` with ``start_load_kv``."""

    def save(self, save: Save) -> None:
        """Start to copy blocks out. vLLM: ``save_kv_layer`` with ``wait_for_save``."""

    def release(self, request_id: str) -> None:
        """The request left: give back what its lookups hold. vLLM: ``request_finished``."""

    def poll(self) -> list[TransferEvent]:
        """The events since the last call. vLLM: ``get_finished``."""

    def close(self) -> None:
        """Stop, and answer whatever is still open as failed."""
