"""Some of the messages that ``make fuzz`` sends by the hundred thousand."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.stand import standing

MESSAGES = 150  # to each port


@pytest.mark.cluster
@pytest.mark.parametrize(
    "tls", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "tls"]
)
def test_no_message_and_no_bytes_do_harm(tmp_path: Path, tls: bool) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    with standing(tmp_path, tls) as stand:
        assert not asyncio.run(fuzz(stand, MESSAGES, seed, 0.2))
