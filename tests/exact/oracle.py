"""Plain ``transformers`` generate on the same weights: what every answer is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

ROWS = 32  # prompts at once: one step of a tiny model costs the same for many rows as for one
PAD = 0

Tokens = Sequence[int]


class Oracle:
    """One model in float32, greedy."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        self._model = cast(PreTrainedModel, model)
        self._model.generation_config.pad_token_id = PAD
        self._made: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: Tokens, max_tokens: int) -> list[int]:
        """The tokens after ``prompt``, end of sequence included; made once for each."""
        key = tuple(prompt), max_tokens
        if key not in self._made:
            (self._made[key],) = self._greedy([prompt], max_tokens)
        return self._made[key]

    def greedy_all(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        """As ``greedy`` for each of many prompts, in a fraction of the time.

        Padding changes the order of sums: tokens at near ties (``gap``) may be others.
        """
        for rows in _alike(prompts):
            made = self._greedy(rows, max_tokens)
            self._made |= {
                (tuple(row), max_tokens): tokens for row, tokens in zip(rows, made, strict=True)
            }
        return [self.greedy(prompt, max_tokens) for prompt in prompts]

    def _greedy(self, rows: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, rows))
        pads = [longest - len(row) for row in rows]
        made = self._model.generate(  # type: ignore[operator]
            torch.tensor([[PAD] * pad + [*row] for pad, row in zip(pads, rows, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
        )
        return [self._ended(tokens) for tokens in made[:, longest:].tolist()]

    def _ended(self, tokens: list[int]) -> list[int]:
        """Up to the end of sequence: a row that has ended is padded until the others have."""
        eos = self._model.generation_config.eos_token_id
        ends = {eos} if isinstance(eos, int) else {*(eos or ())}
        last = (place for place, token in enumerate(tokens) if token in ends)
        return tokens[: next(last, len(tokens)) + 1]

    def gap(self, prompt: Tokens, made: Tokens) -> float:
        """The smallest distance between the two likeliest logits at any of the tokens made."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *made]])).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def _alike(prompts: Sequence[Tokens]) -> Iterator[Sequence[Tokens]]:
    """All prompts, in batches of like lengths."""
    ordered = sorted(prompts, key=len)
    for first in range(0, len(ordered), ROWS):
        yield ordered[first : first + ROWS]
