"""Places in the arena: none overlaps another, all come back, and fragmentation does not grow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from kvstore.index.slots import ALIGNMENT, GRANULE, SLAB, SMALL, SlotAllocator, slot_bytes

CAPACITY = 64 << 20


def random_size(source: random.Random) -> int:
    """As many small blocks as large ones, from a few bytes to 4 MiB."""
    return int(2 ** source.uniform(7, 22))


def model_size(source: random.Random) -> int:
    """One model's blocks: most are full, the others have 1 to 15 of 16 positions."""
    return 320 + (1 << 16) * (16 if source.random() < 0.8 else source.randrange(1, 16))


def seeded() -> random.Random:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_a_slot_is_aligned_and_little_longer_than_its_block() -> None:
    sizes = [*range(1, 70_000, 7), *(2**n + d for n in range(10, 28) for d in (-1, 0, 1, 320))]
    for size in sizes:
        slot = slot_bytes(size)
        assert slot % (ALIGNMENT if slot <= SMALL else GRANULE) == 0
        waste = size // 8 + ALIGNMENT if size <= SMALL else size // 32 + GRANULE
        assert 0 <= slot - size <= waste


def test_slots_never_overlap_and_all_come_back() -> None:
    source, slots = seeded(), SlotAllocator(CAPACITY)
    taken: dict[int, int] = {}
    for _ in range(20_000):
        if taken and (source.random() < 0.4 or slots.used > CAPACITY * 0.8):
            offset = source.choice(list(taken)) if len(taken) < 50 else next(iter(taken))
            slots.give(offset, taken.pop(offset))
        else:
            size = random_size(source)
            offset_or_none = slots.take(size)
            if offset_or_none is not None:
                assert offset_or_none not in taken
                taken[offset_or_none] = size
    assert slots.used == sum(map(slot_bytes, taken.values()))
    ends = sorted((offset, offset + slot_bytes(size)) for offset, size in taken.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= CAPACITY
    for offset, size in taken.items():
        slots.give(offset, size)
    assert (slots.used, slots.free_runs, slots.longest) == (0, 1, CAPACITY)


@pytest.mark.parametrize("size_of", [random_size, model_size])
def test_a_soak_at_the_limit_does_not_fragment_more_and_more(
    size_of: Callable[[random.Random], int],
) -> None:
    """The oldest goes when there is no room, as in a store; how full it stays is watched."""
    source, slots = seeded(), SlotAllocator(CAPACITY)
    taken: list[tuple[int, int]] = []
    fullness: list[float] = []
    for step in range(40_000):
        size = size_of(source)
        while (offset := slots.take(size)) is None:
            slots.give(*taken.pop(0))
        taken.append((offset, size))
        if step % 100 == 0 and step >= 4_000:
            fullness.append(sum(size for _, size in taken) / CAPACITY)
    tenth = len(fullness) // 10
    first, last = fullness[:tenth], fullness[-tenth:]
    print(f"full: {sum(first) / tenth:.3f} at first, {sum(last) / tenth:.3f} at last")
    assert sum(last) / tenth > sum(first) / tenth - 0.05
    assert min(last) > 0.4
    for offset, size in taken:
        slots.give(offset, size)
    assert (slots.used, slots.free_runs, slots.longest) == (0, 1, CAPACITY)


def test_a_slab_that_is_empty_goes_back() -> None:
    slots = SlotAllocator(4 * SLAB)
    small = [slots.take(1000) for _ in range(4 * SLAB // 1024)]
    assert None not in small
    assert slots.take(1000) is None
    assert slots.take(SLAB) is None
    for offset in small[: len(small) // 2]:
        assert offset is not None
        slots.give(offset, 1000)
    assert slots.longest == 2 * SLAB
    assert slots.take(2 * SLAB) is not None
