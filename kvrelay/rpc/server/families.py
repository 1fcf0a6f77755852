"""What the metrics pages of router, workers and store share: names, histograms, labels.

The bounds of histograms are those of vLLM 0.32 for the same quantity, so that its dashboards and
alerts work here. Between two tokens there are three more below its first, 10 ms: small models are
faster than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrelay.rpc.security import renewal
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.server.authorization import refused

PREFIX = "kvrelay:"

REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Of the time to the first token, and of its parts that vLLM does not have.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
SAMPLES = (1, 2, 5, 10, 20)

disable_created_metrics()  # type: ignore[no-untyped-call]  # the time of its creation is no use


def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
    """A histogram without labels, which is in no registry."""
    return Histogram(PREFIX + name, text, registry=None, buckets=bounds)


def labelled(metrics: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Add ``labels`` to every sample; a label that a sample has itself keeps its value."""
    for metric in metrics:
        metric.samples = [
            sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples
        ]
        yield metric


def security() -> Iterator[Metric]:
    """The end of this process's certificate, if it has one, reloads of its files, refusals."""
    tls = installed().tls
    if tls is not None and tls.expires is not None:
        yield GaugeMetricFamily(
            PREFIX + "certificate_expiry_timestamp_seconds",
            "End of this process's certificate, in seconds since 1970.",
            tls.expires,
        )
    family = CounterMetricFamily(
        PREFIX + "credential_reloads",
        "Times that certificates or credentials had changed, by whether they are used.",
        labels=["result"],
    )
    for result, count in renewal.results().items():
        family.add_metric([result], count)
    yield family
    family = CounterMetricFamily(
        PREFIX + "unauthorized_calls",
        "Calls and HTTP requests refused for their token.",
        labels=["reason"],
    )
    for reason, count in refused.items():
        family.add_metric([reason], count)
    yield family
