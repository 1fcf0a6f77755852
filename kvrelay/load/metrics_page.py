"""What a server's ``/metrics`` page says of a load: the change of its counters and histograms.

For servers whose answers do not say how long a request was queued: kvrelay's HTTP door and vLLM.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from kvrelay.load.figures import QUANTILES

QUEUE = "request_queue_time_seconds"
MIGRATIONS = "router_migrations_total"
LINE = re.compile(r"^(?:\w+:)?(\w+?)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
BOUND = re.compile(r'le="([^"]+)"')


class MetricsPage:
    """The sums of what is of interest, over all labels."""

    def __init__(self, text: str = "") -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._buckets: defaultdict[float, float] = defaultdict(float)
        for name, labels, shown in LINE.findall(text):
            with suppress(ValueError):  # a line without a number
                value = _finite(shown)
                if name in (MIGRATIONS, f"{QUEUE}_sum", f"{QUEUE}_count"):
                    self._values[name] += value
                elif name == f"{QUEUE}_bucket" and (bound := BOUND.search(labels)):
                    self._buckets[float(bound[1])] += value

    def migrations_since(self, before: MetricsPage) -> int | None:
        """``None`` if the server counts none."""
        if MIGRATIONS not in self._values:
            return None
        return round(self._values[MIGRATIONS] - before._values[MIGRATIONS])

    def queue_since(self, before: MetricsPage) -> Mapping[str, float | None] | None:
        """Mean and quantiles of the queue, ``None`` without requests.

        A quantile lies between two bounds. It cannot exceed what the sum allows, were all values
        below it 0 and all others equal to it: the first bucket of vLLM ends at 0.3 s.
        """
        count = self._values[f"{QUEUE}_count"] - before._values[f"{QUEUE}_count"]
        total = self._values[f"{QUEUE}_sum"] - before._values[f"{QUEUE}_sum"]
        if count <= 0:
            return None
        below = [(at, self._buckets[at] - before._buckets[at]) for at in sorted(self._buckets)]
        found: dict[str, float | None] = {"mean": total / count}
        for part in QUANTILES:
            value = _quantile(below, part * count)
            most = total / (count - part * count)
            found[f"p{part * 100:g}"] = None if value is None else min(value, most)
        return {**found, "max": None}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _quantile(below: list[tuple[float, float]], rank: float) -> float | None:
    """As Prometheus' ``histogram_quantile``: linear within a bucket."""
    low, fewer = 0.0, 0.0
    for bound, count in below:
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - fewer) / max(count - fewer, 1e-12)
        low, fewer = bound, count
    return None
