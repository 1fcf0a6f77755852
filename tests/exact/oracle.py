"""Plain ``transformers`` generate on the same weights: what every answer is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class Oracle:
    """One model in float32, one prompt at a time, greedy."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        self._model = cast(PreTrainedModel, model)
        self._model.generation_config.pad_token_id = 0
        self._made: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens after ``prompt``, end of sequence included; made once for each."""
        key = tuple(prompt), max_tokens
        if key not in self._made:
            self._made[key] = self._greedy(prompt, max_tokens)
        return self._made[key]

    def _greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        made = self._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
        )
        return cast("list[int]", made[0, len(prompt) :].tolist())

    def gap(self, prompt: Sequence[int], made: Sequence[int]) -> float:
        """The smallest distance between the two likeliest logits at any of the tokens made."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *made]])).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).values
        return float((best[:, 0] - best[:, 1]).min())
