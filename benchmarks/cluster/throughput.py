"""Part a: the cluster beside ``transformers`` on the same weights and prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.cluster.config import ClusterBenchConfig, RandomPrompts
from benchmarks.cluster.rows import BenchRow, Better
from benchmarks.cluster.streams import Burst, run
from benchmarks.cluster.transformers_baseline import Baseline, TimedTokens, TransformersBaseline

log = logging.getLogger(__name__)


class Throughput:
    """Every workload is run by all sides in turn, so that a drift of the machine affects all."""

    def __init__(
        self,
        config: ClusterBenchConfig,
        router: str,
        model: TransformersBaseline,
        prompts: RandomPrompts,
    ) -> None:
        self._config = config
        self._router = router
        self._model = model
        self._prompts = prompts
        self._generate: dict[str, Baseline] = {"generate": model.generate}
        self._batch: dict[str, Baseline] = {"generate_batch": model.continuous}

    def rows(self) -> Iterator[BenchRow]:
        """Four workloads against both batching modes of ``transformers``."""
        long = self._config.scaled(1024)
        self._run(2, 32, 4)  # the first request of each side is slower
        yield from self._compare(f"first token, {long:,}-token prompt", 1, long, 1)
        yield from self._compare(f"8 prompts of {long:,}, prompt tokens/s", 8, long, 1)
        short, new = self._config.scaled(64), self._config.scaled(128)
        yield from self._compare(f"16 streams {short}+{new}, output tokens/s", 16, short, new)
        yield from self._compare(f"one stream {short}+{new}, ms a token", 1, short, new)

    def _compare(self, name: str, streams: int, tokens: int, new: int) -> Iterator[BenchRow]:
        ours: list[float] = []
        theirs: dict[str, list[float]] = {rival: [] for rival in self._rivals(streams)}
        equal = 0
        for _ in range(self._config.times):
            burst, timed = self._run(streams, tokens, new)
            ours.append(_figure(burst.seconds, streams, tokens, new))
            for rival, made in timed.items():
                theirs[rival].append(_figure(made.seconds, streams, tokens, new))
            equal += _equal(burst, timed.get("generate"))
        unit, better = _unit(streams)
        for rival, figures in theirs.items():
            of = streams * self._config.times
            yield BenchRow(
                part="a",
                name=name,
                unit=unit,
                ours=median(ours),
                rival=median(figures) if figures else None,
                against=f"transformers {rival}",
                better=better,
                note=f"{equal}/{of} answers equal" if rival == "generate" else "",
            )

    def _run(self, streams: int, tokens: int, new: int) -> tuple[Burst, dict[str, TimedTokens]]:
        prompts = self._prompts.many(streams, tokens)
        burst = run("router", self._router, prompts, new)
        timed = {}
        for name, rival in self._rivals(streams).items():
            try:
                timed[name] = rival(prompts, new)
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                log.warning("transformers %s does not work here: %s", name, error)
        return burst, timed

    def _rivals(self, streams: int) -> dict[str, Baseline]:
        """``generate_batch`` takes half a second to start: no baseline for one stream."""
        return self._generate if streams == 1 else {**self._generate, **self._batch}


def _figure(seconds: float, streams: int, tokens: int, new: int) -> float:
    if streams == 1:
        return seconds * 1e3 / new
    return streams * (tokens if new == 1 else new) / seconds


def _unit(streams: int) -> tuple[str, Better]:
    if streams == 1:
        return "ms", "less"
    return "tokens/s", "more"


def _equal(burst: Burst, timed: TimedTokens | None) -> int:
    if timed is None:
        return 0
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = list(
        zip((line.tokens for line in burst.lines), timed.tokens, strict=True)
    )
    return sum(ours == theirs for ours, theirs in pairs)
