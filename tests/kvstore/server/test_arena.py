"""The arena: touched early without changing what is stored, and never taken for another's."""

from __future__ import annotations

import os
import sys

import pytest

from kvrelay.errors import Corrupt
from kvstore.server.arena import Arena, capacity_for
from kvstore.server.prefault import Prefault
from kvstore.wire.arena import open_arena

BOOT = b"b" * 16

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not shared")


def pages_of(fd: int) -> int:
    """512-byte units the system has given to a file."""
    return os.stat(fd).st_blocks


def test_touching_makes_every_page_and_changes_nothing() -> None:
    arena = Arena(BOOT, 16 << 20)
    assert arena.fd is not None
    place = arena.take(5000)
    assert place is not None
    arena.view(place, 5000)[:] = b"x" * 5000
    before = pages_of(arena.fd)
    prefault = Prefault(arena.whole)
    prefault.start()
    assert prefault.join(30.0)
    assert pages_of(arena.fd) * 512 >= arena.size > before * 512
    assert arena.view(place, 5000) == b"x" * 5000
    assert open_arena(arena.fd, arena.size, BOOT)[place : place + 5000] == b"x" * 5000


def test_touching_can_be_stopped() -> None:
    arena = Arena(BOOT, 64 << 20)
    prefault = Prefault(arena.whole)
    prefault.stop()
    prefault.start()
    assert prefault.join(30.0)
    assert arena.fd is not None
    assert pages_of(arena.fd) * 512 < arena.size


def test_a_reader_refuses_what_is_not_the_arena_of_this_start() -> None:
    arena = Arena(BOOT, 1 << 20)
    assert arena.fd is not None
    with pytest.raises(Corrupt, match="is of start"):
        open_arena(arena.fd, arena.size, b"c" * 16)
    other = os.memfd_create("not-an-arena")
    os.ftruncate(other, 8192)
    with pytest.raises(Corrupt, match="is not an arena"):
        open_arena(other, 8192, BOOT)
    os.close(other)


def test_the_segment_is_little_longer_than_the_budget() -> None:
    for budget in (1 << 20, 1 << 30, 10**11):
        assert budget < capacity_for(budget) <= budget * 17 // 16 + (2 << 20)


def test_a_place_is_taken_and_given_back() -> None:
    arena = Arena(BOOT, 1 << 20)
    places = [arena.take(300_000) for _ in range(4)]
    assert places[-1] is None
    first = places[0]
    assert first is not None
    assert first % 128 == 0
    arena.give(first, 300_000)
    assert arena.take(300_000) == first
