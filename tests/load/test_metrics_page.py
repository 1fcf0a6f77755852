"""The queue as a server's metrics page has it."""

from __future__ import annotations

import pytest

from kvrelay.load.metrics_page import MetricsPage


def page(fast: int, slow: int, total: float) -> MetricsPage:
    """``fast`` requests waited less than 0.3 s, ``slow`` ones 0.3 to 0.5 s."""
    buckets = {"0.3": fast, "0.5": fast + slow, "+Inf": fast + slow}
    name = "kvrelay:request_queue_time_seconds"
    lines = [f'{name}_bucket{{model_name="m",le="{le}"}} {count}' for le, count in buckets.items()]
    return MetricsPage("\n".join((*lines, f"{name}_sum {total}", f"{name}_count {fast + slow}")))


def test_a_queue_that_was_empty_shows_no_wait() -> None:
    """The bucket alone would say 0.15, 0.27 and 0.297 s."""
    queue = page(200, 0, 1.5).queue_since(page(100, 0, 1.0))
    assert queue == pytest.approx(
        {"mean": 0.005, "p50": 0.01, "p90": 0.05, "p99": 0.297, "max": None}
    )
    assert page(100, 0, 1.0).queue_since(page(100, 0, 1.0)) is None


def test_quantiles_of_a_queue_lie_between_bounds() -> None:
    queue = page(50, 50, 35.0).queue_since(MetricsPage())
    assert queue == pytest.approx(
        {"mean": 0.35, "p50": 0.3, "p90": 0.46, "p99": 0.496, "max": None}
    )
