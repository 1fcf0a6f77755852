"""One benchmark run: brings up the cluster that each part needs and yields its rows."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.cluster import first_token, handoff, router_cost
from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.rows import BenchRow
from benchmarks.cluster.throughput import Throughput
from benchmarks.cluster.transformers_baseline import TransformersBaseline
from kvrelay.cluster.supervisor import Cluster
from kvrelay.engine.attention.native.library import NoKernel, load_kernel
from kvrelay.process.cores import available_cores


class ClusterBench:
    """The model, its prompts, and the parts that were asked for."""

    def __init__(self, config: ClusterBenchConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._model = TransformersBaseline(directory, config.dtype, config.cores)
        self._prompts = RandomPrompts(self._model.vocabulary, config.seed)

    def describe(self) -> str:
        """The machine and the model in words."""
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
        return (
            f"{self._directory.name}, {self._model.parameters / 1e6:.1f} M parameters,"
            f" {self._config.dtype}; {available_cores()} cores ({platform.machine()}), {gpu},"
            f" {self._config.cores} threads, {_kernel()}; torch {torch.__version__},"
            f" transformers {version('transformers')}, Python {platform.python_version()}"
        )

    def rows(self) -> Iterator[BenchRow]:
        parts = self._config.parts
        if "a" in parts or "c" in parts:
            with self._cluster(prefill=1) as cluster:
                if "a" in parts:
                    yield from Throughput(
                        self._config, cluster.router, self._model, self._prompts
                    ).rows()
                if "c" in parts:
                    yield from handoff.rows(self._config, cluster.router, self._prompts)
        if "b" in parts:
            with self._cluster(prefill=2) as cluster:
                workers = cluster.addresses("prefill")
                longest = self._model.longest
                yield from first_token.rows(self._config, workers, self._prompts, longest)
        if "d" in parts:
            with self._cluster(prefill=0) as cluster:
                worker = cluster.addresses("decode")[0]
                pid = cluster.process("router").pid
                yield from router_cost.rows(
                    self._config, cluster.router, pid, worker, self._prompts
                )

    def _cluster(self, prefill: int) -> Cluster:
        return Cluster(self._config.cluster(self._directory, prefill))


def _kernel() -> str:
    """The attention kernel of the CPU; without it every figure is another."""
    try:
        return f"kernel {load_kernel().profile}"
    except NoKernel as error:
        return f"SDPA ({error})"
