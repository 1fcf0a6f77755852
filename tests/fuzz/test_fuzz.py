"""Some hundreds of the messages that ``make fuzz`` sends by the hundred thousand."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.stand import standing

MESSAGES = 1200


@pytest.mark.cluster
def test_no_message_and_no_bytes_do_harm(tmp_path: Path) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    with standing(tmp_path) as stand:
        assert not asyncio.run(fuzz(stand, MESSAGES, seed, 0.2))
