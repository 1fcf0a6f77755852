"""The sampler for vLLM's model runner V2: what the rows ask for stays on the device.

V2 chooses tokens without telling the host, so the token is drawn where the logits are: a request's
numbers are written once, when it gets its slot; a step adds positions that are on the device
already. Nothing is read back. Has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.engine.sampling.draw import Filters, draw, temperature_of, top_k_of
from kvrelay.engine.sampling.tensor_philox import TensorPhilox
from kvrelay.engine.vllm.rules import Rules
from kvrelay.sampling import Sampling

_WORD = 0xFFFFFFFF
_PLAIN = Sampling(temperature=0.0)


class DeviceRows:
    """The rules of ``slots`` requests on one device, for logits of ``vocabulary`` columns."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._rules: dict[int, Rules] = {}
        self._philox = TensorPhilox(device)
        self._numbers = torch.zeros((slots, 8), dtype=torch.int32, device=device)
        self._ours = torch.zeros(slots, dtype=torch.bool, device=device)
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=device)

    def set(self, slot: int, rules: Rules | None) -> None:
        """A request takes a slot; ``None``: vLLM's own sampler chooses its tokens."""
        self._rules.pop(slot, None)
        if rules is not None:
            self._rules[slot] = rules
        sampling = _PLAIN if rules is None else rules.sampling
        numbers = torch.from_numpy(self._words(sampling))
        self._numbers[slot].copy_(numbers, non_blocking=True)
        self._ours[slot].fill_(rules is not None)
        self._greedy[slot].fill_(sampling.temperature == 0)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, last: torch.Tensor, known: Sequence[int]
    ) -> torch.Tensor:
        """Logits [R, vocabulary] in which our rows have one possible token.

        ``slots`` and ``last`` (the position of each row's last token) are on the device, ``known``
        are the slots of the step on the host.
        """
        samplings = [self._rules[slot].sampling for slot in known if slot in self._rules]
        if not samplings:
            return logits
        slots = slots.long()
        final = logits.float()
        tokens = final.argmax(-1)
        drawn = [sampling for sampling in samplings if sampling.temperature > 0]
        if drawn:
            chosen = draw(final, self._filters(slots, last, drawn), waits=False)
            tokens = torch.where(self._greedy[slots], tokens, chosen)
        only = torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)
        return torch.where(self._ours[slots][:, None], only, logits)

    def _filters(
        self, slots: torch.Tensor, last: torch.Tensor, drawn: Sequence[Sampling]
    ) -> Filters:
        numbers = self._numbers[slots]
        numbers[:, 2] = last + 1  # the token that is chosen has the next position
        floats = numbers.view(torch.float32)
        limits = [top_k_of(sampling, self._vocabulary) for sampling in drawn]
        return Filters(
            temperatures=floats[:, 4:5],
            top_k=numbers[:, 5:6].long(),
            top_p=floats[:, 6:7],
            min_p=floats[:, 7:8],
            uniforms=self._philox.uniforms(numbers[:, :4])[:, None],
            largest_k=max((limit for limit in limits if limit < self._vocabulary), default=0),
            cuts=any(sampling.top_p < 1.0 for sampling in drawn),
            floors=any(sampling.min_p > 0.0 for sampling in drawn),
        )

    def _words(self, sampling: Sampling) -> np.ndarray:
        """Seed (two words), position (two), temperature, top-k, top-p, min-p."""
        seed = sampling.seed or 0
        floats = np.array((temperature_of(sampling), sampling.top_p, sampling.min_p), np.float32)
        temperature, top_p, min_p = floats.view(np.uint32).tolist()
        limit = top_k_of(sampling, self._vocabulary)
        words = (seed & _WORD, seed >> 32, 0, 0, temperature, limit, top_p, min_p)
        return np.array(words, np.uint32).view(np.int32)


def v2_reasons(sampling: Sampling) -> list[str]:
    """What V2 cannot choose by: it needs the tokens so far, or a grammar, on the device."""
    reasons = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "logit_bias": bool(sampling.logit_bias),
        "bad_word_ids": bool(sampling.bad_word_ids),
        "min_tokens": sampling.min_tokens > 0,
        "structured_output": sampling.structured_output is not None,
    }
    return [name for name, used in reasons.items() if used]
