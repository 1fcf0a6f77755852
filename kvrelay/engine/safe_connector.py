"""Turns connector exceptions into cache misses.

An exception in the middle of an admission would leave loads and saves that hold blocks for ever.
Instead it is logged and counts as a miss, and the worker computes the tokens.
"""

from __future__ import annotations

import logging

from kvrelay.engine.core.external import Connector, Load, Loaded, Query, Save, Saved, TransferEvent
from kvrelay.usage import Miss

log = logging.getLogger(__name__)


class SafeConnector:
    """The calls of a ``Connector`` that a step makes."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._events: list[TransferEvent] = []

    def lookup(self, query: Query) -> int | None:
        """No tokens, if the connector raises."""
        try:
            return self._connector.lookup(query)
        except Exception as error:  # noqa: BLE001 - the edge: a connector that breaks is a miss
            self._report("lookup", query.request_id, error)
            return 0

    def why(self, request_id: str) -> Miss | None:
        """``Miss.UNKNOWN``, if the connector raises."""
        try:
            return self._connector.why(request_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._report("why", request_id, error)
            return Miss.UNKNOWN

    def load(self, load: Load) -> None:
        """A load that could not start ends with no tokens."""
        try:
            self._connector.load(load)
        except Exception as error:  # noqa: BLE001 - as above
            self._report("load", load.request_id, error)
            self._events.append(Loaded(load.request_id, load.epoch, 0, Miss.UNKNOWN))

    def save(self, save: Save) -> None:
        """A save that could not start ends with nothing stored."""
        try:
            self._connector.save(save)
        except Exception as error:  # noqa: BLE001 - as above
            self._report("save", save.request_id, error)
            self._events.append(Saved(save.request_id, save.epoch, save.serial, 0))

    def release(self, request_id: str) -> None:
        """If the connector raises, the leases end by their deadlines."""
        try:
            self._connector.release(request_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._report("release", request_id, error)

    def poll(self) -> list[TransferEvent]:
        """The connector's events, and those of transfers that could not start."""
        events = self._events
        self._events = []
        try:
            return events + self._connector.poll()
        except Exception as error:  # noqa: BLE001 - as above
            self._report("poll", "any", error)
            return events

    def _report(self, call: str, request_id: str, error: Exception) -> None:
        log.error("the connector failed in %s for request %s", call, request_id, exc_info=error)
