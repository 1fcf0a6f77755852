"""A scripted connector, for integration tests of anything built on the engine.

It answers lookups and ends loads and saves by script: right, late, short, wrong, twice or in
another order. On its own it moves no bytes. Wrapped around another connector it distorts the
events of that one, so that the KV it claims is in the pool. ``kvrelay.connector.script`` reads the
script from a file: ``--store mock:FILE``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvrelay.engine.core.external import Connector, Load, Loaded, Query, Save, Saved, TransferEvent
from kvrelay.usage import Miss

T = TypeVar("T")
RECORDED = 256
"""Calls of each kind that are kept, with their tokens, for tests."""
RELEASED = 10_000
"""Ids of the last released requests that are kept."""


@dataclass(frozen=True, slots=True)
class MockEnd:
    """How one load or save ends.

    ``amount`` is what its event claims (tokens of a load, blocks of a save), any number at all;
    ``None`` is the truth: what the inner connector did, or everything without one. The event
    comes ``after`` that many polls, ``times`` times (0: never). Before it comes one stray event for
    each of ``strays``, with an epoch that is off by that number. ``missed`` is the reason of a
    short load. ``cancels``: until its event the load can be cancelled, by the inner connector too.
    """

    amount: int | None = None
    after: int = 0
    times: int = 1
    strays: tuple[int, ...] = ()
    missed: Miss = Miss.UNKNOWN
    cancels: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """What to do, by request id; ``"*"`` is for every request without lines of its own.

    A worker serves a leg as ``ID/NUMBER``; the lines for ``ID`` start anew with each leg. Each line
    is used once, the last one for ever after. A lookup's line is the number of tokens after
    ``local`` (any number, true or not), ``None`` for "look up again", or ``"ask"`` for the inner
    connector's answer. With ``reverse`` the events of one poll come in reverse order. A line of
    ``misses`` is why an admission found no more; without any, the inner connector is asked.
    """

    lookups: Mapping[str, Sequence[int | str | None]] = field(default_factory=dict)
    loads: Mapping[str, Sequence[MockEnd]] = field(default_factory=dict)
    saves: Mapping[str, Sequence[MockEnd]] = field(default_factory=dict)
    misses: Mapping[str, Sequence[Miss]] = field(default_factory=dict)
    reverse: bool = False


class MockConnector:
    """``fill(load, valid)`` is called just before a load's event, to write the KV it will claim."""

    def __init__(
        self,
        script: Script | None = None,
        inner: Connector | None = None,
        fill: Callable[[Load, int], None] | None = None,
    ) -> None:
        self.script = script or Script()
        self.queries: deque[Query] = deque(maxlen=RECORDED)
        self.loads: deque[Load] = deque(maxlen=RECORDED)
        self.saves: deque[Save] = deque(maxlen=RECORDED)
        self.released: deque[str] = deque(maxlen=RELEASED)
        self.inner = inner
        self._fill = fill
        self._used: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._ends: dict[tuple[str, int, int | None], MockEnd] = {}  # by id, epoch and serial
        self._filling: dict[tuple[str, int], tuple[Load, int]] = {}
        self._unstoppable: set[tuple[str, int]] = set()  # open loads that do not cancel
        self._due: deque[tuple[int, TransferEvent]] = deque()
        self._notify: Callable[[], None] = _nothing

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        if self.inner is not None:
            self.inner.start(notify)

    def lookup(self, query: Query) -> int | None:
        self.queries.append(replace(query, tokens=tuple(query.tokens), names=tuple(query.names)))
        line = self._line(self.script.lookups, query.request_id, "ask")
        if isinstance(line, str):
            return 0 if self.inner is None else self.inner.lookup(query)
        if line is None:
            self._notify()
        return line

    def why(self, request_id: str) -> Miss | None:
        inner = Miss.NEVER_STORED if self.inner is None else self.inner.why(request_id)
        return self._line(self.script.misses, request_id, inner)

    def load(self, load: Load) -> None:
        self.loads.append(load)
        end = self._line(self.script.loads, load.request_id, MockEnd())
        if not end.cancels:
            self._unstoppable.add((load.request_id, load.epoch))
        if self.inner is not None:
            self._ends[load.request_id, load.epoch, None] = end
            self.inner.load(load)
            return
        valid = load.external if end.amount is None else end.amount
        self._filling[load.request_id, load.epoch] = load, min(max(valid, 0), load.external)
        missed = end.missed if valid < load.external else None
        self._enqueue(Loaded(load.request_id, load.epoch, valid, missed), end)

    def cancel(self, request_id: str, epoch: int) -> bool:
        if (request_id, epoch) in self._unstoppable:
            return False
        self._filling.pop((request_id, epoch), None)
        return self.inner is None or self.inner.cancel(request_id, epoch)

    def save(self, save: Save) -> None:
        self.saves.append(save)
        end = self._line(self.script.saves, save.request_id, MockEnd())
        if self.inner is not None:
            self._ends[save.request_id, save.epoch, save.serial] = end
            self.inner.save(save)
            return
        stored = len(save.contents) if end.amount is None else end.amount
        self._enqueue(Saved(save.request_id, save.epoch, save.serial, stored), end)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self._used.pop(request_id, None)
        if self.inner is not None:
            self.inner.release(request_id)

    def poll(self) -> list[TransferEvent]:
        if self.inner is not None:
            for event in self.inner.poll():
                self._distort(event)
        due = [event for polls, event in self._due if polls <= 0]
        self._due = deque((polls - 1, event) for polls, event in self._due if polls > 0)
        if self._due:
            self._notify()
        for event in due:
            self._write(event)
        return due[::-1] if self.script.reverse else due

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def _write(self, event: TransferEvent) -> None:
        """Write the KV of a load, once, just before its event: until then the load holds them."""
        if not isinstance(event, Loaded):
            return
        self._unstoppable.discard((event.request_id, event.epoch))
        load, valid = self._filling.pop((event.request_id, event.epoch), (None, 0))
        if load is not None and self._fill is not None:
            self._fill(load, valid)

    def _distort(self, event: TransferEvent) -> None:
        """Change an event of the inner connector as the script says."""
        if isinstance(event, Loaded):
            end = self._ends.pop((event.request_id, event.epoch, None), MockEnd())
            if end.amount is not None and end.amount < event.valid:
                event = replace(event, valid=end.amount, missed=end.missed)
        else:
            key = (event.request_id, event.epoch, event.serial)
            end = self._ends.pop(key, MockEnd())
            if end.amount is not None:
                event = replace(event, stored=end.amount)
        self._enqueue(event, end)

    def _enqueue(self, event: TransferEvent, end: MockEnd) -> None:
        strays: list[TransferEvent] = [replace(event, epoch=event.epoch + by) for by in end.strays]
        self._due.extend((end.after, each) for each in (*strays, *[event] * end.times))
        self._notify()

    def _line(self, lines: Mapping[str, Sequence[T]], request_id: str, default: T) -> T:
        keys = (request_id, request_id.rpartition("/")[0], "*")
        script = next((lines[key] for key in keys if key in lines), ())
        if not script:
            return default
        number = self._used[request_id][id(lines)]
        self._used[request_id][id(lines)] += 1
        return script[min(number, len(script) - 1)]


def _nothing() -> None:
    """``notify`` before ``start``."""
