"""The compiled attention kernel, for every test that needs it."""

from __future__ import annotations

import pytest

from kvrelay.engine.attention.native import build


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile what an install has not: a second run compiles nothing."""
    try:
        build.build()
    except build.BuildError as error:
        pytest.skip(str(error))
