"""A connector that never raises: one that breaks in a call has nothing, as any store that fails.

An error in the middle of an admission would leave loads and saves that hold blocks and that nobody
was ever told of. Here it is a miss with a line in the log, and the work is done locally.
"""

from __future__ import annotations

import logging

from kvrelay.engine.core.external import Connector, Load, Loaded, Query, Save, Saved, TransferEvent
from kvrelay.usage import Miss

log = logging.getLogger(__name__)


class SafeConnector:
    """The calls of ``Connector`` that a step makes, on one that may break."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._events: list[TransferEvent] = []

    def lookup(self, query: Query) -> int | None:
        """Nothing, if it breaks."""
        try:
            return self._connector.lookup(query)
        except Exception as error:  # noqa: BLE001 - the edge: a connector that breaks is a miss
            self._tell("lookup", query.request_id, error)
            return 0

    def why(self, request_id: str) -> Miss | None:
        """Unknown, if it breaks."""
        try:
            return self._connector.why(request_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("why", request_id, error)
            return Miss.UNKNOWN

    def load(self, load: Load) -> None:
        """A load that could not be started has ended with nothing."""
        try:
            self._connector.load(load)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("load", load.request_id, error)
            self._events.append(Loaded(load.request_id, load.epoch, 0, Miss.UNKNOWN))

    def save(self, save: Save) -> None:
        """A save that could not be started has ended with nothing."""
        try:
            self._connector.save(save)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("save", save.request_id, error)
            self._events.append(Saved(save.request_id, save.epoch, save.serial, 0))

    def release(self, request_id: str) -> None:
        """What its lookups hold ends with its lease, if it breaks."""
        try:
            self._connector.release(request_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("release", request_id, error)

    def poll(self) -> list[TransferEvent]:
        """The connector's events, and those of what could not be started."""
        events = self._events
        self._events = []
        try:
            return events + self._connector.poll()
        except Exception as error:  # noqa: BLE001 - as above
            self._tell("poll", "any", error)
            return events

    def _tell(self, call: str, request_id: str, error: Exception) -> None:
        log.error("the connector broke in %s for %s", call, request_id, exc_info=error)
