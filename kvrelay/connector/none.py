"""No external KV: every lookup finds nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.core.external import Load, Loaded, Query, Save, Saved, TransferEvent


class NoConnector:
    """The connector of a worker without a store."""

    def __init__(self) -> None:
        self._events: list[TransferEvent] = []
        self._notify: Callable[[], None] | None = None

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def lookup(self, query: Query) -> int | None:
        return 0

    def why(self, request_id: str) -> None:
        return None

    def load(self, load: Load) -> None:
        self._events.append(Loaded(load.request_id, load.epoch, 0))

    def cancel(self, request_id: str, epoch: int) -> bool:
        return True  # it writes nothing

    def save(self, save: Save) -> None:
        self._events.append(Saved(save.request_id, save.epoch, save.serial, 0))
        if self._notify is not None:
            self._notify()

    def release(self, request_id: str) -> None:
        pass

    def poll(self) -> list[TransferEvent]:
        events = self._events
        self._events = []
        return events

    def close(self) -> None:
        pass
