"""A get from several backends at once; blocks come in the order in which they were wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from contextvars import copy_context
from queue import SimpleQueue

from kvrelay.errors import KvrelayError
from kvstore.base import GetResult, Want
from kvstore.multi.backend import StoreBackend

log = logging.getLogger("kvrelay.store")


class BackendFetch:
    """A get from one backend in a thread of its own, as a context.

    At the end of ``with`` the thread has ended: nothing is written into the buffers after it.
    """

    def __init__(self, backend: StoreBackend, wants: Sequence[Want], timeout: float) -> None:
        self._backend = backend
        self._wants = wants
        self._timeout = timeout
        self._arrived: SimpleQueue[GetResult | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name=f"fetch {backend.name}", daemon=True
        )

    def __enter__(self) -> BackendFetch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def __iter__(self) -> Iterator[GetResult]:
        """The blocks in order; ends early if the backend fails."""
        while (got := self._arrived.get()) is not None:
            yield got

    def _run(self) -> None:
        try:
            with closing(self._backend.store.get(self._wants, self._timeout)) as arriving:
                for got in arriving:
                    self._arrived.put(got)
                    if self._stopping.is_set():
                        break
        except KvrelayError as error:
            _log_failure(self._backend, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: it ends this fetch
            _log_crash(self._backend, error)
        finally:
            self._arrived.put(None)


def fetch(
    backends: Sequence[StoreBackend | None], wants: Sequence[Want], timeout: float
) -> Generator[GetResult, None, None]:
    """Each of ``wants`` from its backend; ``None``: absent. Blocks of a failing backend are absent.

    The first backend is read in the caller's thread and the others at the same time. A call that
    needs one backend only raises its error.
    """
    groups: dict[str, list[int]] = {}
    by_name = {backend.name: backend for backend in backends if backend is not None}
    for index, backend in enumerate(backends):
        if backend is not None:
            groups.setdefault(backend.name, []).append(index)
    parts = {name: [wants[index] for index in indices] for name, indices in groups.items()}
    with ExitStack() as stack:
        streams: dict[str, Iterator[GetResult]] = {}
        for name in list(groups)[1:]:
            streams[name] = iter(
                stack.enter_context(BackendFetch(by_name[name], parts[name], timeout))
            )
        for name in list(groups)[:1]:
            arriving = stack.enter_context(closing(by_name[name].store.get(parts[name], timeout)))
            streams[name] = (
                arriving if len(groups) == 1 else _until_failure(by_name[name], arriving)
            )
        for index, backend in enumerate(backends):
            got = None if backend is None else next(streams[backend.name], None)
            if backend is None or got is None:
                yield GetResult(index, None)
            else:
                yield GetResult(index, got.header, got.summed, backend.name)


def _until_failure(backend: StoreBackend, arriving: Iterator[GetResult]) -> Iterator[GetResult]:
    """The blocks until the backend fails."""
    try:
        yield from arriving
    except KvrelayError as error:
        _log_failure(backend, error)


def _log_crash(backend: StoreBackend, error: Exception) -> None:
    log.error("a fetch from %s failed", backend.name, exc_info=error)


def _log_failure(backend: StoreBackend, error: KvrelayError) -> None:
    log.info("%s: the rest of a get counts as absent: %s", backend.name, error)
