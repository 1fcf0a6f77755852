"""Philox against the known answers of Random123 1.14 (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import pytest

from kvrelay.engine.sampling.philox import Counter, philox, uniform

ONES = 0xFFFFFFFF
KNOWN: list[tuple[Counter, tuple[int, int], Counter]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: Counter, key: tuple[int, int], answer: Counter) -> None:
    assert philox(counter, key) == answer


def test_uniform_is_the_first_53_bits() -> None:
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    draws = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(draws)) == 2500
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / 2500 - 0.5) < 0.02


def test_all_bits_of_seed_and_position_count() -> None:
    base = uniform(0, 0)
    assert all(uniform(1 << bit, 0) != base != uniform(0, 1 << bit) for bit in range(64))


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 1 << 64)])
def test_out_of_range_is_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="64 unsigned bits"):
        uniform(seed, position)
