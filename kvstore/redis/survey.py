"""Which blocks are there, and their expiry put off: one round trip to each server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.usage import Miss
from kvstore.base import Lease
from kvstore.redis.call import RedisCall
from kvstore.redis.settings import RedisSettings

BOOT = b"redis"
"""Of every lease: nothing depends on places, so nothing is stale after a restart."""


@dataclass(frozen=True, slots=True)
class RedisSurvey:
    """Bytes of each block, ``None`` if it is absent; of ``silent`` ones no server said anything.

    The first ``full`` of those found are there until ``until[0]``, others until ``until[1]``.
    """

    sizes: tuple[int | None, ...]
    silent: frozenset[int]
    full: int
    until: tuple[float, float] | None

    def lease(self, found: Sequence[int]) -> Lease | None:
        """Of the blocks with these numbers, which live at least so long, if there is room."""
        if not found or self.until is None:
            return None
        return Lease(1, BOOT, min(self.until[index >= self.full] for index in found))

    def why(self, index: int) -> Miss:
        """The reason why a block could not be had."""
        return Miss.UNREACHABLE if index in self.silent else Miss.UNKNOWN


def survey_blocks(
    call: RedisCall, names: Sequence[bytes], full: int, ttl: float, settings: RedisSettings
) -> RedisSurvey:
    """Ask. With a ``ttl`` all that are there are prolonged as by any use; ``full`` are full."""
    lives = settings.lives(False), settings.lives(True)

    def request(index: int, key: bytes) -> bytes:
        named = b"$%d\r\n%b\r\n" % (len(key), key)
        if not ttl:
            return b"*2\r\n$6\r\nSTRLEN\r\n" + named
        life = lives[index >= full]
        return b"*2\r\n$6\r\nSTRLEN\r\n%b*3\r\n$7\r\nPEXPIRE\r\n%b$%d\r\n%b\r\n" % (
            named,
            named,
            len(life),
            life,
        )

    asked = time.monotonic()
    answers = call.ask(names, request, 2 if ttl else 1)
    held = settings.life, settings.partial_life
    return RedisSurvey(
        tuple(None if answer is None else _size(answer) for answer in answers),
        frozenset(index for index, answer in enumerate(answers) if answer is None),
        full,
        (asked + min(ttl, held[0]), asked + min(ttl, held[1])) if ttl else None,
    )


def _size(answer: list[bytes]) -> int | None:
    """From ``:LENGTH`` and, if it was prolonged, ``:1``; what is absent has the length 0."""
    length = answer[0][1:] if answer else b""
    there = length.isdigit() and length != b"0" and answer[-1] != b":0"
    return int(length) if there else None
