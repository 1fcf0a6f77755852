"""Blocks of one call that come from several stores at once, in the order they were asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from queue import SimpleQueue

from kvrelay.errors import KvrelayError
from kvstore.base import GetResult, Want
from kvstore.multi.backend import StoreBackend

log = logging.getLogger("kvrelay.store")


class BackendFetch:
    """The blocks of one store, fetched in a thread of their own. As a context it ends with it:

    when ``with`` is left nobody writes into the buffers any more.
    """

    def __init__(self, arm: StoreBackend, wants: Sequence[Want], timeout: float) -> None:
        self._arm = arm
        self._wants = wants
        self._timeout = timeout
        self._came: SimpleQueue[GetResult | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fetch {arm.name}", daemon=True)

    def __enter__(self) -> BackendFetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def __iter__(self) -> Iterator[GetResult]:
        """What comes; it ends early when the store fails."""
        while (got := self._came.get()) is not None:
            yield got

    def _run(self) -> None:
        try:
            with closing(self._arm.store.get(self._wants, self._timeout)) as arriving:
                for got in arriving:
                    self._came.put(got)
                    if self._stopping.is_set():
                        break
        except KvrelayError as error:
            _failed(self._arm, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: it ends this fetch
            _crashed(self._arm, error)
        finally:
            self._came.put(None)


def fetch(
    arms: Sequence[StoreBackend | None], wants: Sequence[Want], timeout: float
) -> Generator[GetResult, None, None]:
    """Each of ``wants`` from the store beside it, ``None``: absent. A failing store's are absent.

    The first store is read in the caller's thread and the others at the same time; a call that
    needs one store only fails with it.
    """
    groups: dict[str, list[int]] = {}
    by_name = {arm.name: arm for arm in arms if arm is not None}
    for index, arm in enumerate(arms):
        if arm is not None:
            groups.setdefault(arm.name, []).append(index)
    parts = {name: [wants[index] for index in indices] for name, indices in groups.items()}
    with ExitStack() as held:
        streams: dict[str, Iterator[GetResult]] = {}
        for name in list(groups)[1:]:
            streams[name] = iter(
                held.enter_context(BackendFetch(by_name[name], parts[name], timeout))
            )
        for name in list(groups)[:1]:
            arriving = held.enter_context(closing(by_name[name].store.get(parts[name], timeout)))
            streams[name] = arriving if len(groups) == 1 else _misses(by_name[name], arriving)
        for index, arm in enumerate(arms):
            got = None if arm is None else next(streams[arm.name], None)
            if arm is None or got is None:
                yield GetResult(index, None)
            else:
                yield GetResult(index, got.header, got.summed, arm.name)


def _misses(arm: StoreBackend, arriving: Iterator[GetResult]) -> Iterator[GetResult]:
    """What comes until the store fails."""
    try:
        yield from arriving
    except KvrelayError as error:
        _failed(arm, error)


def _crashed(arm: StoreBackend, error: Exception) -> None:
    log.error("a fetch from %s failed", arm.name, exc_info=error)


def _failed(arm: StoreBackend, error: KvrelayError) -> None:
    log.info("%s: the rest of a get is absent: %s", arm.name, error)
