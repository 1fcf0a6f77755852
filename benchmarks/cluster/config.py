"""What a benchmark run measures, on which model, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.config import SHIPPED_MODEL, ClusterConfig
from kvrelay.config.reader import check, option
from kvrelay.errors import Rejected
from kvrelay.process.cores import available_cores
from kvrelay.worker.config import DTYPES

PARTS = {
    "a": "throughput against plain transformers",
    "b": "first token: cold, local hit, store hit",
    "c": "the handoff from prefill to decode",
    "d": "what the router adds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBenchConfig:
    """Flags of ``kvrelay bench``."""

    model: str = option("recall", "model directory; 'recall' is the shipped model", metavar="DIR")
    shape: str | None = option(None, "make a model of random weights of this shape instead")
    dtype: str = option("auto", "number format", choices=DTYPES)
    only: tuple[str, ...] = option((), "only these parts: a,b", metavar="PARTS")
    quick: bool = option(False, "each figure once, with a quarter of the prompt")
    repeat: int = option(3, "how often each figure is taken; the median counts", low=1, high=100)
    threads: int | None = option(None, "threads of a worker and of transformers", low=1)
    block_size: int | None = option(None, "token positions in a block", low=1)
    num_blocks: int | None = option(None, "blocks in each worker's pool", low=1)
    seed: int = option(0, "of the prompts", low=0)
    json: bool = option(False, "print the rows as JSON, and nothing else")
    markdown: bool = option(False, "print the rows as a table for a README")

    def __post_init__(self) -> None:
        check(self)
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise Rejected("only", f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        if self.shape is not None and self.model != "recall":
            raise Rejected("shape", "give either --model or --shape")

    @property
    def parts(self) -> tuple[str, ...]:
        named = [part.strip() for text in self.only for part in text.split(",")]
        return tuple(named) or tuple(PARTS)

    @property
    def times(self) -> int:
        return 1 if self.quick else self.repeat

    @property
    def cores(self) -> int:
        return self.threads or available_cores()

    def scaled(self, tokens: int) -> int:
        """A prompt length, shortened in a quick run."""
        return max(16, tokens // 4) if self.quick else tokens

    def cluster(self, directory: Path, prefill: int, decode: int = 1) -> ClusterConfig:
        """The cluster of a part. One phase runs at a time, so every worker may use every core."""
        return ClusterConfig(
            model=str(directory),
            prefill=prefill,
            decode=decode,
            port=0,
            dtype=self.dtype,
            threads=self.cores,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            disaggregate="always",  # the handoff is measured even where it does not pay
        )


def model_directory(config: ClusterBenchConfig, made: Path) -> Path:
    """The model's directory; a shape is written below ``made``."""
    if config.shape is None:
        return SHIPPED_MODEL if config.model == "recall" else Path(config.model)
    from benchmarks.random_model import make_model

    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    make_model(config.shape, made, dtype)
    return made


class RandomPrompts:
    """Prompts of random token ids, never the same twice, the same in every run of a seed."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = random.Random(f"kvrelay bench {seed}")
        self._vocabulary = vocabulary

    def draw(self, tokens: int) -> list[int]:
        """A new prompt. The lower ids are left out: most are special tokens."""
        low = min(300, self._vocabulary // 2)
        return [self._random.randrange(low, self._vocabulary) for _ in range(tokens)]

    def many(self, count: int, tokens: int) -> list[list[int]]:
        return [self.draw(tokens) for _ in range(count)]
