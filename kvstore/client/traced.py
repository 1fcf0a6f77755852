"""Spans of the calls to a store, made by its client: they cover every transport, and Redis.

The store's own spans of its gRPC calls are children of these. A caller that is not traced pays for
one look at its context in each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing

from kvrelay.rpc import tracing
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    NameQuery,
    Offer,
    Outcome,
    Store,
    SurveyResult,
    Want,
)
from kvstore.stats import StoreStats
from kvstore.urls import public_url

ASKED, FOUND, BYTES = "kvrelay.blocks.asked", "kvrelay.blocks.found", "kvrelay.store.bytes"
MISSED = "kvrelay.missed.reason"
URL, TRANSPORT = "kvrelay.store.url", "kvrelay.store.transport"


class TracedStore:
    """A ``Store``. The calls that find or move blocks for a traced leg are client spans."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._public = public_url(store.url)

    @property
    def url(self) -> str:
        return self._store.url

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        with self._span("store lookup", len(query.names) + len(query.tails)) as span:
            with tracing.under(span):
                found = self._store.lookup(query, timeout)
            if span.on:
                reason = {} if found.missing is None else {MISSED: found.missing.value}
                span.set({FOUND: len(found.sizes), BYTES: sum(found.sizes), **reason})
            return found

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        with self._span("store survey", len(query.names)) as span:
            with tracing.under(span):
                found = self._store.survey(query, timeout)
            if span.on:
                present = [size for size in found.sizes if size is not None]
                span.set({FOUND: len(present), BYTES: sum(present)})
            return found

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        if not tracing.current().on:
            return self._store.get(wants, timeout)
        return self._traced_get(wants, timeout)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        with self._span("store put", len(offers)) as span:
            with tracing.under(span):
                outcomes = self._store.put(offers, timeout)
            if span.on:
                counts = Counter(outcome.status.value for outcome in outcomes)
                statuses = {
                    f"kvrelay.blocks.{status.replace(' ', '_')}": count
                    for status, count in counts.items()
                }
                span.set({BYTES: sum(offer.size for offer in offers), **statuses})
            return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        self._store.release(leases, timeout)

    def stats(self, timeout: float) -> StoreStats:
        return self._store.stats(timeout)

    def clear(self, timeout: float) -> int:
        return self._store.clear(timeout)

    def close(self) -> None:
        self._store.close()

    def _span(self, name: str, asked: int) -> tracing.Span:
        current = tracing.current()
        return current.child(name, {URL: self._public, ASKED: asked}, call=True)

    def _traced_get(
        self, wants: Sequence[Want], timeout: float
    ) -> Generator[GetResult, None, None]:
        """The span is current while the store works, and not while the reader has a block."""
        found = sent = 0
        with self._span("store get", len(wants)) as span:
            with tracing.under(span):
                arriving = self._store.get(wants, timeout)
            try:
                while True:
                    with tracing.under(span):
                        got = next(arriving, None)
                    if got is None:
                        return
                    if got.header:
                        found += 1
                        sent += len(got.header) + wants[got.index].buffer.nbytes
                    if got.index == len(wants) - 1:
                        span.complete()
                    yield got
            finally:
                with tracing.under(span), closing(arriving):
                    span.set({FOUND: found, BYTES: sent})
