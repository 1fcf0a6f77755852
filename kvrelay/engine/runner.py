"""One step of a model over its KV pool: works in, sampled tokens out, aligned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvrelay.engine.attention.backend import AttentionStep
from kvrelay.engine.attention.batch import Batch, Packer
from kvrelay.engine.attention.choice import choose_attention
from kvrelay.engine.attention.flash_backend import FlashBackend
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.attention.triton_backend import TritonBackend
from kvrelay.engine.core.updates import Foresee, Sampled, Work
from kvrelay.engine.graphs import CudaGraphs, DecodeGraphs, GraphLimits, GraphRuntime
from kvrelay.engine.model.forward import CausalModel
from kvrelay.engine.model.fused_decoder import FusedDecoder, forward_for
from kvrelay.engine.model.loading import LoadedModel
from kvrelay.engine.sampling.device import DeviceSampler, SamplingPlan
from kvrelay.engine.sampling.masks import GrammarMasks, MaskThread
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.stepping import DeviceLost
from kvrelay.process.cores import MOST_THREADS, available_cores
from kvrelay.process.shared_cores import SharedCores


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Decode steps within ``limits`` are to be graphs of a runtime."""

    limits: GraphLimits
    runtime: Callable[[], GraphRuntime] = CudaGraphs


@dataclass(frozen=True, slots=True)
class Computed:
    """The works of a step, packed, and the logits of ``logit_rows``.

    On a device that samples there are also the plan, and its ``words`` there.
    """

    batch: Batch
    logits: torch.Tensor
    plan: SamplingPlan | None = None
    words: tuple[torch.Tensor, ...] = ()


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
        graphs: GraphOptions | None = None,
    ) -> None:
        self.pool = KVPool(loaded.pool_shape(num_blocks, block_size), loaded.device)
        chosen = choose_attention(attention_backend, self.pool)
        self._backend = chosen.backend
        self._forward = forward_for(loaded.forward, self._backend)
        self.attention_reason = chosen.reason  # why it is not a better one; empty: it is the best
        self._threads = threads
        self._useful: Callable[[int], int] | None = None
        self._shared: SharedCores | None = None
        self._masks = MaskThread(loaded.info.vocab_size, self._mask_threads(loaded.device))
        self._sampler: DeviceSampler | None = None
        self._graphs: DecodeGraphs | None = None
        self.graphs_reason = ""  # why decode steps are no graphs, though asked for
        if isinstance(self._backend, (TritonBackend, FlashBackend)):  # their uploads carry words
            self._sampler = DeviceSampler(loaded.device, loaded.info.vocab_size)
        if isinstance(self._backend, TritonBackend) and graphs is not None:
            self._open_graphs(self._backend, graphs)
        self._packer = Packer(block_size)
        self._executed = 0

    @property
    def threads(self) -> int:
        """The number of intra-op threads of a step; the least, if a step may have more."""
        return self._threads or torch.get_num_threads()

    @property
    def graph_replays(self) -> int:
        """Steps that were CUDA graphs."""
        return 0 if self._graphs is None else self._graphs.replays

    def widen(self, useful: Callable[[int], int]) -> None:
        """Let each step have as many threads as are ``useful`` for its number of positions."""
        self._threads = self.threads
        self._useful = useful

    def share(self, cores: SharedCores) -> None:
        """Bound each step's threads by the cores that other workers leave; call it before any step.

        A compiled forward pass asks again at each layer: a step of a prompt takes seconds.
        """
        self._shared = cores
        if isinstance(self._backend, NativeBackend):
            self._backend.shared = cores.view

    def _mask_threads(self, device: torch.device) -> int:
        """The cores that the model's threads leave; a GPU needs one core."""
        taken = self.threads if device.type == "cpu" else 1
        return min(max(available_cores() - taken, 1), MOST_THREADS)

    @property
    def backend(self) -> str:
        """The name of the attention backend."""
        return self._backend.name

    @property
    def forward(self) -> CausalModel:
        """The forward pass: a fused one where model and backend allow it."""
        return self._forward

    @property
    def attention_profile(self) -> str:
        """The backend chosen at start, with all that decides the bits of its results."""
        return self._backend.profile

    @property
    def executed_positions(self) -> int:
        """Positions computed since the start: the runner's own count (invariant I5)."""
        return self._executed

    def execute(self, works: Sequence[Work], foresee: Foresee = lambda: ()) -> list[Sampled | None]:
        """Compute all works in one forward pass; ``None`` for works that do not sample.

        While a device computes, works of the next step are foreseen, and their tables are made.
        Memory that runs out is an error of the step. An error that CUDA repeats at every later call
        of the process is ``DeviceLost``.
        """
        try:
            return self._execute(works, foresee)
        except RuntimeError as error:
            self._check_device(error)
            raise

    def _execute(self, works: Sequence[Work], foresee: Foresee) -> list[Sampled | None]:
        answers: list[Sampled | None] = [None] * len(works)
        if not works:
            return answers
        try:
            with torch.inference_mode(), self._masks.computing(works) as masks:
                computed = self.compute(works)
                samples = computed.batch.samples
                made = masks()
                arranged = None if made is None else made.arranged(samples)
                asked = [works[index] for index in samples]
                chosen = self._choose(computed, asked, arranged, foresee)
        finally:  # a step that fails may have launched kernels that write its blocks
            self.pool.computed()
        self._executed += sum(work.count for work in works)
        for index, sampled in zip(samples, chosen, strict=True):
            answers[index] = sampled
        return answers

    def _check_device(self, error: RuntimeError) -> None:
        """``DeviceLost`` if it fails again, whatever the class of the first error."""
        if self.pool.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            try:
                torch.cuda.synchronize(self.pool.device)
            except RuntimeError as lost:
                raise DeviceLost(str(error)) from lost

    def compute(self, works: Sequence[Work]) -> Computed:
        """Store the KV of all works, and compute the logits of the rows that sample."""
        threads = self._step_threads(works)
        if threads is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # OpenMP keeps it per thread
        batch = self._packer.pack(works)
        plan = None
        if self._sampler is not None:
            plan = self._sampler.plan([works[index] for index in batch.samples], batch.samples)
            batch = replace(batch, words=plan.words)
        replayed = None if self._graphs is None else self._graphs.step(batch)
        if replayed is not None:
            logits, step = replayed
            return Computed(batch, logits, plan, step.inputs.words)
        launched = self._backend.step(batch)
        return Computed(batch, self._logits(launched), plan, launched.inputs.words)

    def _step_threads(self, works: Sequence[Work]) -> int | None:
        """``None``: as many as torch has."""
        threads = self._threads
        if self._useful is not None:
            threads = max(self.threads, self._useful(sum(work.count for work in works)))
        return threads if self._shared is None else self._shared.compute(threads or self.threads)

    def _logits(self, step: AttentionStep) -> torch.Tensor:
        inputs = step.inputs
        return self._forward.logits(inputs.tokens, inputs.positions, step, inputs.rows)

    def _open_graphs(self, backend: TritonBackend, options: GraphOptions) -> None:
        """Capture the graphs, or say why decode steps are launched kernel by kernel."""
        if not isinstance(self._forward, FusedDecoder):
            self.graphs_reason = "the model's forward pass is that of transformers"
            return
        try:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    backend, self._logits, options.limits, options.runtime()
                )
        except RuntimeError as error:  # what torch raises if a capture fails
            self.graphs_reason = f"{type(error).__name__}: {error}"

    def _choose(
        self,
        computed: Computed,
        works: Sequence[Work],
        masks: GrammarMasks | None,
        foresee: Foresee = lambda: (),
    ) -> list[Sampled]:
        if self._sampler is None or computed.plan is None:
            return sample(computed.logits, works, masks)
        if not works:
            return []
        return self._sampler.sample(
            computed.logits,
            computed.plan,
            computed.words,
            masks,
            lambda: self._packer.foresee(foresee()),
        )
