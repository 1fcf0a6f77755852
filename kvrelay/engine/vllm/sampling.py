"""kvrelay's sampler as a logits processor of vLLM's model runner V1.

A request carries ``extra_args={"kvrelay": {...fields of Sampling..., "prompt_len": P}}``, over
HTTP the same object as a text in ``vllm_xargs``, and temperature 0. The token follows from (seed,
position, logits) alone, so another worker of the same numeric profile continues the request with
the same tokens. The processor chooses it from the raw logits and leaves it as the only possible
one: vLLM's own penalties, filters and seed stay unset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.sampling.masks import MaskThread
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.vllm.grammars import GRAMMARS
from kvrelay.engine.vllm.rules import Rules, check_rules, rules_of, within
from kvrelay.engine.vllm.versions import check_version

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row of vLLM's batch; vLLM extends ``output`` with each token."""

    rules: Rules
    prompt: Sequence[int]
    output: Sequence[int]

    def work(self) -> Work:
        """The row as kvrelay's sampler takes it."""
        tokens = [*self.prompt, *self.output]
        rules = self.rules
        grammar = GRAMMARS.get(rules.id)
        prompt_len = rules.prompt_len or len(self.prompt)
        return Work(tokens, len(tokens) - 1, 1, (), prompt_len, rules.sampling, grammar)


class KvrelaySampling(LogitsProcessor):  # type: ignore[misc]
    """Chooses the token of every row that carries kvrelay's fields; leaves other rows alone."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check_rules(sampling_params)

    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        check_version(vllm.__version__, vllm_config)
        if vllm_config.scheduler_config.async_scheduling:
            raise ValueError(
                "kvrelay's sampler needs the tokens of the last step when it chooses the next:"
                " start vLLM with --no-async-scheduling"
            )
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._rows: dict[int, SampledRow] = {}
        self._masks: MaskThread | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            rules = rules_of(params)
            if rules is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = SampledRow(within(rules, self._vocabulary), prompt or (), output)
        for one, other, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        works = [self._rows[row].work() for row in rows]
        index = torch.tensor(rows, device=logits.device)
        chosen = self._sample(logits[index], works)
        for row, sampled in zip(rows, chosen, strict=True):
            if sampled.error is not None:
                GRAMMARS.fail(self._rows[row].rules.id, sampled.error)
        tokens = torch.tensor([sampled.token for sampled in chosen], device=logits.device)
        logits[index] = -torch.inf
        logits[index, tokens] = 0.0
        return logits

    def _sample(self, logits: torch.Tensor, works: Sequence[Work]) -> list[Sampled]:
        if not any(work.grammar is not None for work in works):
            return sample(logits, works)
        if self._masks is None:
            self._masks = MaskThread(logits.shape[1])
        with self._masks.computing(works) as masks:
            return sample(logits, works, masks())
