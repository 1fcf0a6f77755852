"""kvrelay's sampler as a logits processor of vLLM's model runner V2, the default on GPUs.

Written against V2's interface of vLLM 0.32 and tested on its objects on a CPU; V2 itself needs
Triton and was not run. It reads nothing back from the device. What needs the tokens so far
(penalties, bad words, ``min_tokens``) or a grammar is refused: use V1 for it
(``VLLM_USE_V2_MODEL_RUNNER=0``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from kvrelay.engine.vllm.device_rows import DeviceRows, v2_reasons
from kvrelay.engine.vllm.rules import check_rules, rules_of
from kvrelay.engine.vllm.versions import check_version

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (
        LogitsContext,
        LogitsProcRequestState,
    )


class KvrelaySamplingV2(LogitsProcessor):  # type: ignore[misc]
    """Chooses the token of every row that carries kvrelay's fields; leaves other rows alone."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        check_version(vllm.__version__, vllm_config)
        super().__init__(vllm_config, req_states)
        self._rows = DeviceRows(req_states.max_num_reqs, req_states.vocab_size, req_states.device)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check_rules(sampling_params)
        rules = rules_of(sampling_params)
        if rules is not None and (reasons := v2_reasons(rules.sampling)):
            raise ValueError(
                f"model runner V2 cannot sample with {', '.join(reasons)}: start vLLM with"
                " VLLM_USE_V2_MODEL_RUNNER=0 and kvrelay.engine.vllm.sampling:KvrelaySampling"
            )

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        rules = rules_of(sampling_params)
        self._rows.set(req_idx, rules)
        return rules is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        known = ctx.idx_mapping_np.tolist()
        return self._rows.choose(logits, ctx.expanded_idx_mapping, ctx.pos, known)
