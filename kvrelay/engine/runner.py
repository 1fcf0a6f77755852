"""One step of a model over its KV pool: works in, sampled tokens out, aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.engine.attention.batch import Batch, pack
from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.model.fused_decoder import forward_for
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.sampling.masks import MaskThread
from kvrelay.engine.sampling.sampler import sample


class Runner:
    """Owns a pool and counts what it computes. One thread calls ``execute``.

    ``threads`` is the number of intra-op threads of that thread; ``None`` leaves torch's own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        attention_backend: str = "auto",
        threads: int | None = None,
    ) -> None:
        self.pool = KVPool(loaded.pool_shape(num_blocks, block_size), loaded.device)
        chosen = choose_attention(attention_backend, self.pool)
        self._backend = chosen.backend
        self._forward = forward_for(loaded.forward, self._backend)
        self.attention_reason = chosen.reason  # why it is not a better one; empty: it is the best
        self._threads = threads
        self._masks = MaskThread(loaded.info.vocab_size)
        self._executed = 0

    @property
    def threads(self) -> int:
        """The number of intra-op threads of a step."""
        return self._threads or torch.get_num_threads()

    @property
    def attention_profile(self) -> str:
        """The backend chosen at start, with all that decides the bits of its results."""
        return self._backend.profile

    @property
    def executed_positions(self) -> int:
        """Positions computed since the start: the runner's own count (invariant I5)."""
        return self._executed

    def execute(self, works: Sequence[Work]) -> list[Sampled | None]:
        """Compute all works in one forward pass; ``None`` for works that do not sample."""
        answers: list[Sampled | None] = [None] * len(works)
        if not works:
            return answers
        with torch.inference_mode(), self._masks.computing(works) as masks:
            batch, logits = self.compute(works)
            made = masks()
            chosen = sample(
                logits,
                [works[index] for index in batch.samples],
                None if made is None else made.arranged(batch.samples),
            )
        self.pool.computed()
        self._executed += sum(work.count for work in works)
        for index, sampled in zip(batch.samples, chosen, strict=True):
            answers[index] = sampled
        return answers

    def compute(self, works: Sequence[Work]) -> tuple[Batch, torch.Tensor]:
        """Store the KV of all works; returns them packed, and the logits of ``logit_rows``."""
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # OpenMP keeps it per thread
        batch = pack(works, self.pool.shape.block_size, self.pool.device)
        step = self._backend.step(batch)
        return batch, self._forward.logits(batch.tokens, batch.positions, step, batch.logit_rows)
