"""Scrapes of workers' metrics, and clusters whose workers export them."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.process import ProcessSpec
from tests.cluster.processes import free_beside

WORKERS = ("prefill", "decode")
PAGE = ("model_name", "worker", "role")  # labels of every sample of a worker
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: every sample by name and labels, those of the whole page left out."""

    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    def __call__(self, name: str, **labels: str) -> float:
        """The value of a sample, its name without prefix and suffix."""
        key = tuple(sorted(labels.items()))
        for suffix in ("_total", ""):
            if (value := self.samples.get((f"kvrelay:{name}{suffix}", key))) is not None:
                return value
        raise KeyError(name, labels)

    def by_source(self) -> float:
        """Prompt tokens over all sources."""
        return sum(self("prompt_tokens_by_source", source=source) for source in SOURCES)


def parsed(text: str) -> Scrape:
    """The samples of an exposition."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in PAGE}
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return Scrape(samples)


def scrape(port: int) -> Scrape:
    """Ask now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return parsed(answer.read().decode())


def measured(
    ports: dict[str, int], store: Callable[[str], str] = lambda url: url
) -> Callable[[ClusterConfig], tuple[ProcessSpec, ...]]:
    """A layout whose workers have a metrics port each, entered in ``ports`` by name.

    ``store`` makes their store's URL out of that of the real one.
    """

    def layout(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
        made = process_specs(config)
        workers = [spec for spec in made if spec.role in WORKERS]
        free = free_beside(made, len(workers))
        ports.update({spec.name: port for spec, port in zip(workers, free, strict=True)})
        return tuple(_measured(spec, ports, store) if spec in workers else spec for spec in made)

    return layout


def _measured(
    spec: ProcessSpec, ports: Mapping[str, int], store: Callable[[str], str]
) -> ProcessSpec:
    at = spec.args.index("--store") + 1
    args = (*spec.args[:at], store(spec.args[at]), *spec.args[at + 1 :])
    return replace(spec, args=(*args, "--metrics-port", str(ports[spec.name])))
