"""One question to several stores at once, and how long their answers are waited for."""

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
"""The part of a survey's time that a store may take before the others' answers are told."""

R = TypeVar("R")


def survey(
    arms: Sequence[StoreBackend],
    names: Sequence[bytes],
    leading: int,
    ttl: float,
    timeout: float,
    openings: Sequence[int] = (),
) -> dict[str, SurveyResult]:
    """The answers that came in time, doubted stores last; what is held by others goes back.

    Nobody is waited for when the first ``leading`` names have been found before him, nor when he
    was late. The first error when all failed.
    """
    deadline = time.monotonic() + timeout * PATIENCE
    arms = sorted(arms, key=lambda arm: arm.doubted)
    asked = {arm.name: arm.ask(_surveying(names, ttl, openings), timeout) for arm in arms}
    while waited := _worth_waiting(arms, asked, leading):
        left = deadline - time.monotonic()
        if left <= 0:
            for arm in waited:
                arm.late = True
            break
        wait([asked[arm.name] for arm in waited], left, FIRST_COMPLETED)
    answers: dict[str, SurveyResult] = {}
    errors: list[KvrelayError] = []
    for arm in arms:
        found = result(asked[arm.name])
        if isinstance(found, SurveyResult):
            answers[arm.name] = found
        else:
            arm.disown(asked[arm.name])
            errors.append(found)
    if not answers:
        raise errors[0]
    return answers


def call_all(
    arms: Sequence[StoreBackend], call: Callable[[Store, float], R], timeout: float
) -> list[R | KvrelayError]:
    """The answer of each, or why there is none."""
    asked = [arm.ask(call, timeout) for arm in arms]
    wait(asked, timeout)
    answers: list[R | KvrelayError] = []
    for future in asked:
        found = result(future)
        answers.append(found)
    return answers


def result(future: Future[R]) -> R | KvrelayError:
    """What has come, or why nothing has."""
    if not future.done():
        return DeadlineExceeded("a store did not answer in time")
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, KvrelayError):
        return error
    raise error


def _surveying(
    names: Sequence[bytes], ttl: float, openings: Sequence[int]
) -> Callable[[Store, float], SurveyResult]:
    def ask(store: Store, left: float) -> SurveyResult:
        seen = store.survey(names, ttl, left, openings)
        if len(seen.sizes) != len(names):
            raise Corrupt("sizes", f"{len(seen.sizes)} came for {len(names)} names")
        return seen

    return ask


def _worth_waiting(
    arms: Sequence[StoreBackend], asked: Mapping[str, Future[SurveyResult]], leading: int
) -> list[StoreBackend]:
    """The stores still to answer that were not late before and could add anything."""
    waited: list[StoreBackend] = []
    before: dict[str, SurveyResult] = {}
    for arm in arms:
        if not asked[arm.name].done():
            waited += [] if arm.late else [arm]
        elif isinstance(seen := result(asked[arm.name]), SurveyResult):
            before[arm.name] = seen
            if None not in owners(before, len(seen.sizes))[:leading]:
                break
    return waited
