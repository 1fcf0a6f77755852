"""The reference that is no server: greedy decoding by ``transformers``, one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvrelay.errors import Rejected
from kvrelay.load.request import AnswerPiece, LoadRequest
from kvrelay.model_folder import missing_folder


class TransformersDoor:
    """A model folder, on the CPU, in the dtype of its weights."""

    def __init__(self, path: str, ignore_eos: bool) -> None:
        try:
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            why = missing_folder(Path(path)) or f"transformers cannot load it: {error}"
            raise Rejected("check", f"{path}: {why}") from error
        self._model.train(False)
        ends = self._model.generation_config.eos_token_id
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._ends = frozenset[int]() if ignore_eos else frozenset(listed)

    async def ask(self, request: LoadRequest, timeout: float) -> AsyncGenerator[AnswerPiece, None]:  # noqa: ASYNC109 - the caller has the clock
        ids = await asyncio.to_thread(self._generate, request)
        ended = "stop" if ids and ids[-1] in self._ends else "length"
        yield AnswerPiece(time.perf_counter(), "", ids, ended)

    async def close(self) -> None:
        """The model goes with this object."""

    @torch.inference_mode()
    def _generate(self, request: LoadRequest) -> list[int]:
        """The likeliest token each time; a computed position is never computed again."""
        given, cache = torch.tensor([request.ids()]), None
        answer: list[int] = []
        while len(answer) < request.max_tokens and not (answer and answer[-1] in self._ends):
            output = self._model(given, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            answer.append(int(output.logits[0, -1].argmax()))
            given = torch.tensor([answer[-1:]])
        return answer
