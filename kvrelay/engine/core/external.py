"""External KV as the engine sees it: the connector's calls and events, and the values they carry.

The protocol lives with the engine that makes the calls; ``kvrelay.connector`` implements it. A
lookup writes nothing. A load and a save each hold references on their blocks until their event
arrives or the load is cancelled, even if the request has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvrelay.usage import Miss

K = TypeVar("K")
UNKNOWN_STORE = "unknown"


@dataclass(frozen=True, slots=True)
class Query:
    """A lookup for one waiting request: how many tokens after ``local`` does the store have?

    ``tokens`` are the request's ``L`` token ids and ``names`` the names of its full blocks, in
    order; both are the request's own lists, to be read and never kept or changed. ``local`` is the
    number of leading tokens found in this worker's pool, a multiple of the block size. ``space`` is
    as in ``Order``.
    """

    request_id: str
    tokens: Sequence[int]
    names: Sequence[bytes]
    local: int
    space: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class BlockContent:
    """One block of a save: the pool block, and the content it holds.

    The content is ``len(tokens)`` positions, at most the block size. ``name`` commits to them and
    to ``parent``, the name of the block before (the namespace's root for the first block).
    """

    block: int
    name: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """An order to fill positions ``[local, local + external)`` of a request from the store.

    ``tokens`` are all ``L`` of the request and ``names`` those of its full blocks. ``blocks`` are
    the pool blocks from position ``local`` on, one for each block of the range. Bytes written into
    them past ``local + external`` are overwritten before they are read.
    """

    request_id: str
    epoch: int
    local: int
    external: int
    tokens: tuple[int, ...]
    names: tuple[bytes, ...]
    blocks: tuple[int, ...]
    space: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Save:
    """An order to copy blocks to the store. ``serial`` numbers the saves of the engine."""

    request_id: str
    epoch: int
    serial: int
    contents: tuple[BlockContent, ...]
    space: bytes = field(default=b"", repr=False)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The pool blocks that are read."""
        return tuple(content.block for content in self.contents)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended: the first ``valid`` of its ``external`` tokens are written and verified.

    ``missed`` is the reason if the load ends short. ``sources`` are the stores of the tokens, each
    with its number of tokens; the comparison of two events ignores them.
    """

    request_id: str
    epoch: int
    valid: int
    missed: Miss | None = None
    sources: tuple[tuple[str, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Saved:
    """A save has ended: its first ``stored`` blocks are in the store, written now or before."""

    request_id: str
    epoch: int
    serial: int
    stored: int


TransferEvent = Loaded | Saved


class Connector(Protocol):
    """External KV as one engine sees it. Every call returns at once; the work runs elsewhere.

    Each method names its counterpart in vLLM's ``KVConnectorBase_V1``. Every ``load`` is answered
    by exactly one ``Loaded`` and every ``save`` by exactly one ``Saved``, within a deadline that
    the connector keeps. The engine survives late, repeated, wrong and unknown events.
    """

    def start(self, notify: Callable[[], None]) -> None:
        """Begin work; ``notify`` (thread-safe) is called when an event or an answer is ready."""

    def lookup(self, query: Query) -> int | None:
        """Tokens available after ``query.local``; ``None``: look up again after a ``notify``.

        vLLM: ``get_num_new_matched_tokens``.
        """

    def why(self, request_id: str) -> Miss | None:
        """Why the first block after those that the last lookup found is missing.

        Called once for each request, between the lookup and the load of its first admission.
        ``None``: there was no lookup, or it found all.
        """

    def load(self, load: Load) -> None:
        """Start to fill blocks. vLLM: ``update_state_after_alloc`` with ``start_load_kv``."""

    def cancel(self, request_id: str, epoch: int) -> bool:
        """Give up a load: its request was preempted or has ended.

        ``True``: no byte of it will be written from now on, so its blocks are free at once; also if
        the load is unknown or has ended. ``False``: it may still write; it should end soon. Its
        ``Loaded`` comes in both cases. vLLM has no counterpart: it waits for the load.
        """

    def save(self, save: Save) -> None:
        """Start to copy blocks out. vLLM: ``save_kv_layer`` with ``wait_for_save``."""

    def release(self, request_id: str) -> None:
        """The request has left: release the leases of its lookups. vLLM: ``request_finished``."""

    def poll(self) -> list[TransferEvent]:
        """The events since the last call. vLLM: ``get_finished``."""

    def close(self) -> None:
        """Stop; loads and saves that are still open end as failed."""


def apportion(sources: Iterable[tuple[str, int]], external: int) -> Mapping[str, int]:
    """Tokens by store, ``external`` in all.

    The scheduler counts tokens and knows of no store. What the connector reports is cut to
    ``external`` or filled up with ``UNKNOWN_STORE``, so the sum by store is always ``external``.
    """
    by_store: dict[str, int] = {}
    left = external
    for store, tokens in (*sources, (UNKNOWN_STORE, external)):
        count = min(max(tokens, 0), left)
        if count:
            by_store[store] = by_store.get(store, 0) + count
            left -= count
    return by_store


def add_counts(one: Mapping[K, int], other: Mapping[K, int]) -> Mapping[K, int]:
    """The sums by key."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
