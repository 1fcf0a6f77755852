"""Turns connector exceptions into cache misses.

An exception in the middle of an admission would leave loads and saves that hold blocks for ever.
Instead it is logged and counts as a miss, and the worker computes the tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from kvrelay.engine.core.external import Connector, Load, Loaded, Query, Save, Saved, TransferEvent
from kvrelay.engine.core.updates import LegTrace
from kvrelay.process import logs
from kvrelay.usage import Miss

log = logging.getLogger(__name__)


class SafeConnector:
    """The calls of a ``Connector`` that a step makes."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._events: list[TransferEvent] = []
        self._asked: dict[str, float] = {}  # when the lookup of a request was sent, if it waits
        self._looked_up: dict[str, tuple[float, float]] = {}
        self._traces: dict[str, LegTrace] = {}

    def follow(self, request_id: str, trace: LegTrace | None) -> None:
        """What a request asks of the store belongs to its trace, until ``release``."""
        if trace is not None:
            self._traces[request_id] = trace

    def lookup(self, query: Query) -> int | None:
        """No tokens, if the connector raises."""
        with _logged("lookup", query.request_id, self._traces):
            answer = self._connector.lookup(query)
            if answer is None:
                self._asked.setdefault(query.request_id, time.monotonic())
            elif (asked := self._asked.pop(query.request_id, None)) is not None:
                self._looked_up[query.request_id] = asked, time.monotonic()
            return answer
        return 0

    def looked_up(self, request_id: str, now: float) -> tuple[float, float] | None:
        """Begin and end of a request's last lookup; ``None`` if it did not wait for one.

        The end is ``now`` if the answer has not come.
        """
        if (asked := self._asked.get(request_id)) is not None:
            return asked, now
        return self._looked_up.get(request_id)

    def why(self, request_id: str) -> Miss | None:
        """``Miss.UNKNOWN``, if the connector raises."""
        with _logged("why", request_id):
            return self._connector.why(request_id)
        return Miss.UNKNOWN

    def load(self, load: Load) -> None:
        """A load that could not start ends with no tokens."""
        with _logged("load", load.request_id, self._traces):
            self._connector.load(load)
            return
        self._events.append(Loaded(load.request_id, load.epoch, 0, Miss.UNKNOWN))

    def cancel(self, request_id: str, epoch: int) -> bool:
        """The load keeps its blocks until it ends, if the connector raises."""
        with _logged("cancel", request_id):
            return self._connector.cancel(request_id, epoch)
        return False

    def save(self, save: Save) -> None:
        """A save that could not start ends with nothing stored."""
        with _logged("save", save.request_id, self._traces):
            self._connector.save(save)
            return
        self._events.append(Saved(save.request_id, save.epoch, save.serial, 0))

    def release(self, request_id: str) -> None:
        """If the connector raises, the leases end by their deadlines."""
        self._asked.pop(request_id, None)
        self._looked_up.pop(request_id, None)
        self._traces.pop(request_id, None)
        with _logged("release", request_id):
            self._connector.release(request_id)

    def poll(self) -> list[TransferEvent]:
        """The connector's events, and those of transfers that could not start."""
        events = self._events
        self._events = []
        with _logged("poll", "any"):
            events += self._connector.poll()
        return events


@contextmanager
def _logged(
    call: str, request_id: str, traces: Mapping[str, LegTrace] = MappingProxyType({})
) -> Iterator[None]:
    """Log what the connector raises, and continue after the block, which belongs to the trace."""
    trace = traces.get(request_id)
    try:
        if trace is None:
            yield
        else:
            with trace.calling():
                yield
    except Exception as error:  # noqa: BLE001 - the edge: a connector that breaks is a miss
        _report(call, request_id, error)


def _report(call: str, request_id: str, error: Exception) -> None:
    message, more = "the connector failed in %s for request %s", logs.about_leg(request_id)
    log.error(message, call, request_id, exc_info=error, extra=more)
