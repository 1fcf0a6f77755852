"""A survey of several backends at once, and how long it waits for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError
from kvstore.base import Store, SurveyResult
from kvstore.multi.backend import StoreBackend
from kvstore.multi.union import owners

PATIENCE = 0.5
"""The part of a survey's timeout after which it returns without the missing answers."""

R = TypeVar("R")


def survey(
    backends: Sequence[StoreBackend],
    names: Sequence[bytes],
    leading: int,
    ttl: float,
    timeout: float,
    first_block_hashes: Sequence[int] = (),
) -> dict[str, SurveyResult]:
    """The answers that came in time by backend, doubted backends last; late leases are released.

    Does not wait for a backend that is late, nor if backends before it have the first ``leading``
    names. Raises the first error if every backend failed.
    """
    deadline = time.monotonic() + timeout * PATIENCE
    backends = sorted(backends, key=lambda backend: backend.doubted)
    asked = {
        backend.name: backend.submit(_surveying(names, ttl, first_block_hashes), timeout)
        for backend in backends
    }
    while waited := _worth_waiting(backends, asked, leading):
        left = deadline - time.monotonic()
        if left <= 0:
            for backend in waited:
                backend.late = True
            break
        wait([asked[backend.name] for backend in waited], left, FIRST_COMPLETED)
    answers: dict[str, SurveyResult] = {}
    errors: list[KvrelayError] = []
    for backend in backends:
        found = result(asked[backend.name])
        if isinstance(found, SurveyResult):
            answers[backend.name] = found
        else:
            backend.abandon(asked[backend.name])
            errors.append(found)
    if not answers:
        raise errors[0]
    return answers


def call_all(
    backends: Sequence[StoreBackend], call: Callable[[Store, float], R], timeout: float
) -> list[R | KvrelayError]:
    """The answer or the error of each backend."""
    asked = [backend.submit(call, timeout) for backend in backends]
    wait(asked, timeout)
    answers: list[R | KvrelayError] = []
    for future in asked:
        found = result(future)
        answers.append(found)
    return answers


def result(future: Future[R]) -> R | KvrelayError:
    """The answer, or the error, of a call that may still be running."""
    if not future.done():
        return DeadlineExceeded("a store did not answer in time")
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, KvrelayError):
        return error
    raise error


def _surveying(
    names: Sequence[bytes], ttl: float, first_block_hashes: Sequence[int]
) -> Callable[[Store, float], SurveyResult]:
    def call(store: Store, left: float) -> SurveyResult:
        seen = store.survey(names, ttl, left, first_block_hashes)
        if len(seen.sizes) != len(names):
            raise Corrupt("sizes", f"{len(seen.sizes)} came for {len(names)} names")
        return seen

    return call


def _worth_waiting(
    backends: Sequence[StoreBackend], asked: Mapping[str, Future[SurveyResult]], leading: int
) -> list[StoreBackend]:
    """The backends without an answer that are not late and could add blocks."""
    waited: list[StoreBackend] = []
    before: dict[str, SurveyResult] = {}
    for backend in backends:
        if not asked[backend.name].done():
            waited += [] if backend.late else [backend]
        elif isinstance(seen := result(asked[backend.name]), SurveyResult):
            before[backend.name] = seen
            if None not in owners(before, len(seen.sizes))[:leading]:
                break
    return waited
