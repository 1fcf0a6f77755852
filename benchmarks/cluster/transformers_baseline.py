"""Plain ``transformers`` on the same weights: ``generate``, and its continuous batching."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

CACHE_TOKENS = 16384  # enough for every workload of part a
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """Output tokens of each prompt, and the seconds for all of them."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float


Baseline = Callable[[Sequence[Sequence[int]], int], TimedTokens]


class _Output(Protocol):
    generated_tokens: list[int]


class _Model(Protocol):
    """The used part of a ``transformers`` model, whose own annotations lack it."""

    def eval(self) -> object: ...

    def num_parameters(self) -> int: ...

    def generate(
        self, ids: Tensor, *, attention_mask: Tensor, generation_config: GenerationConfig
    ) -> Tensor: ...

    def generate_batch(
        self,
        inputs: list[list[int]],
        *,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        progress_bar: bool,
        persistent_manager: bool,
    ) -> dict[str, _Output]: ...


class TransformersBaseline:
    """A model in this process. Prompts of one call have the same length, so nothing is padded."""

    def __init__(self, directory: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        _silence()
        chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=chosen)
        # Both sides run to the requested length, past the model's end token.
        loaded.generation_config.eos_token_id = None
        self.vocabulary = int(loaded.config.vocab_size)
        self.longest = int(getattr(loaded.config, "max_position_embeddings", 1 << 20))
        self._model = cast(_Model, loaded)
        self._model.eval()
        self.parameters = self._model.num_parameters()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> TimedTokens:
        """One batch through ``generate``."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(count, None)
        )
        seconds = time.perf_counter() - start
        new = made[:, ids.shape[1] :].tolist()
        return TimedTokens(tuple(tuple(row) for row in new), seconds)

    def continuous(self, prompts: Sequence[Sequence[int]], count: int) -> TimedTokens:
        """The same through ``generate_batch``."""
        inputs = [list(prompt) for prompt in prompts]
        start = time.perf_counter()
        made = self._model.generate_batch(
            inputs,
            generation_config=_greedy(count, -1),
            # By default it takes nine tenths of the memory for its cache, and clears it first.
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=CACHE_TOKENS // 256, page_size=256, max_batch_tokens=BATCH_TOKENS
            ),
            progress_bar=False,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
        rows = [made[key].generated_tokens for key in sorted(made, key=_number)]
        return TimedTokens(tuple(tuple(row) for row in rows), seconds)


def _silence() -> None:
    """Keep the progress bars and advice of transformers out of the output."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


def _greedy(count: int, eos: int | None) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=count, eos_token_id=eos, pad_token_id=0
    )


def _number(request: str) -> int:
    return int("".join(letter for letter in request if letter.isdigit()) or 0)
