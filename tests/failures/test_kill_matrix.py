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
PATIENCE_OF_A_CONNECTION = 15.0  # of the client's: 10 s, then 5 s for an answer


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


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=moment_name)
def test_router_stopped(stand: Rig, oracle: Oracle, moment: Moment) -> None:
    """For a while: a pause, and no error."""
    cell = Cell(stand, oracle, "router", moment, random.randrange(1 << 32))
    strike = cell.run(signal.SIGSTOP)
    cell.check(strike)
    assert not any(stream.broken for stream in cell.streams)


@pytest.mark.slow
def test_router_stopped_for_long(stand: Rig, oracle: Oracle) -> None:
    """The client gives up the connection and resumes; late tokens are dropped."""
    silent = PATIENCE_OF_A_CONNECTION + 5
    cell = Cell(stand, oracle, "router", MIDDLE, random.randrange(1 << 32), silent)
    strike = cell.run(signal.SIGSTOP)
    cell.check(strike)
    assert all(stream.broken for stream in cell.streams)


def test_nothing_is_leased_in_the_end(stand: Rig) -> None:
    deadline = time.monotonic() + LEASE_SECONDS
    while (stats := stand.store_stats()).leases or stats.reservations:
        assert time.monotonic() < deadline, stats
        time.sleep(0.2)
