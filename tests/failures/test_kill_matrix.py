"""The kill matrix: every party, at every moment, and the client's tokens are the undisturbed ones.

Where the router itself dies the client gets ``UNAVAILABLE`` and resumes; everywhere else it sees a
pause and no error. Each cell has a greedy and a sampled stream; recovery times are printed.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.exact.oracle import Oracle
from tests.failures.cells import Cell
from tests.failures.moments import MIDDLE, MOMENTS, Moment
from tests.failures.rig import BLOCK, Rig

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
TARGETS = ("router", "prefill", "decode", "store")
LEASE_SECONDS = 40.0


def moment_name(moment: Moment) -> str:
    return moment.name.replace(" ", "-")


@pytest.mark.parametrize("moment", MOMENTS, ids=moment_name)
@pytest.mark.parametrize("target", TARGETS)
def test_killed(stand: Rig, oracle: Oracle, target: str, moment: Moment) -> None:
    cell = Cell(stand, oracle, target, moment, random.randrange(1 << 32))
    strike = cell.run()
    cell.check(strike)
    if target == "decode" and moment is MIDDLE:
        assert cell.recomputed()
        assert cell.beyond(strike) <= 2 * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=moment_name)
@pytest.mark.parametrize("target", ["prefill", "decode", "store"])
def test_stopped(stand: Rig, oracle: Oracle, target: str, moment: Moment) -> None:
    """Alive but silent: streams go on elsewhere; continued, the ghost holds nothing."""
    cell = Cell(stand, oracle, target, moment, random.randrange(1 << 32))
    strike = cell.run(signal.SIGSTOP)
    cell.check(strike)


def test_nothing_is_leased_in_the_end(stand: Rig) -> None:
    deadline = time.monotonic() + LEASE_SECONDS
    while (stats := stand.store_stats()).leases or stats.reservations:
        assert time.monotonic() < deadline, stats
        time.sleep(0.2)
