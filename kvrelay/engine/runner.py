"""One step of a model over its KV pool: works in, sampled tokens out, aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrelay.engine.attention.backend import AttentionBackend
from kvrelay.engine.attention.batch import Batch, pack
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.library import NoKernel
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.sampling.masks import MaskThread
from kvrelay.engine.sampling.sampler import sample
from kvrelay.errors import Rejected


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
        self._forward = loaded.forward
        self._backend = choose_attention(attention_backend, self.pool)
        self._threads = threads
        self._masks = MaskThread(loaded.info.vocab_size)
        self._executed = 0

    @property
    def attention_backend(self) -> str:
        """The name of the backend chosen at start."""
        return self._backend.name

    @property
    def attention_profile(self) -> str:
        """What the numeric profile calls that backend."""
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
        batch = pack(works, self.pool.shape, self.pool.device)
        step = self._backend.step(batch)
        return batch, self._forward.logits(batch.tokens, batch.positions, step, batch.logit_rows)


def choose_attention(name: str, pool: KVPool) -> AttentionBackend:
    """The attention backend of this name; "auto" is SDPA, which runs on every device.

    ``Rejected`` if the name is unknown, or if this machine cannot run that backend.
    """
    if name == "native":
        try:
            return NativeBackend(pool)
        except NoKernel as error:
            raise Rejected("attention_backend", f"native cannot be used: {error}") from error
    if name not in ("auto", "sdpa"):
        raise Rejected("attention_backend", f"{name!r} is not known: auto, sdpa or native")
    return SdpaBackend(pool)
