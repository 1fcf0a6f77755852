"""A survey of several backends at once, and how long it waits for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TypeVar

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError
from kvstore.base import NameQuery, Store, SurveyResult
from kvstore.multi.backend import StoreBackend
from kvstore.multi.union import owners

PATIENCE = 0.5
"""The part of a survey's timeout after which it returns without the missing answers."""

R = TypeVar("R")


def survey(
    backends: Sequence[StoreBackend],
    query: NameQuery,
    leading: int,
    timeout: float,
) -> dict[str, SurveyResult]:
    """The answers by backend, doubted backends last; the leases of late answers are released.

    Does not wait for a backend that is late, nor if backends before it have the first ``leading``
    names. Raises the first error if every backend failed.
    """
    deadline = time.monotonic() + timeout * PATIENCE
    backends = sorted(backends, key=lambda backend: backend.doubted)
    asked = {
        backend.name: backend.submit(partial(_checked_survey, query), timeout)
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
        answer = result(asked[backend.name])
        if isinstance(answer, SurveyResult):
            answers[backend.name] = answer
        else:
            backend.abandon(asked[backend.name])
            errors.append(answer)
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
        answer = result(future)
        answers.append(answer)
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


def _checked_survey(query: NameQuery, store: Store, left: float) -> SurveyResult:
    seen = store.survey(query, left)
    if len(seen.sizes) != len(query.names):
        raise Corrupt("sizes", f"{len(seen.sizes)} were answered for {len(query.names)} names")
    return seen


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
