"""Which part of an answer is reasoning: from the chat template, and from each rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.structured import ReasoningStart
from kvrelay.text.reasoning import TAIL_TOKENS, has_reasoning, start_of
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from kvrelay.v1 import router_pb2

AUTO, THINK = "auto", "think"


class ReasoningSupport:
    """Of one model. ``wanted``: ``think`` or ``none``; ``auto``: if its template has the tags."""

    def __init__(self, tokenizer: Tokenizer, wanted: str) -> None:
        self._tokenizer = tokenizer
        known = wanted == THINK or (wanted == AUTO and has_reasoning(tokenizer.chat_template))
        self._known = known and not isinstance(tokenizer, NoTokenizer)

    def start(self, message: router_pb2.GenerateRequest, prompt: Sequence[int]) -> ReasoningStart:
        """How the answer begins. Only chats have reasoning."""
        if not self._known or not message.HasField("chat"):
            return ""
        tail = list(prompt[-TAIL_TOKENS:])
        return start_of(self._tokenizer.backend.decode(tail, skip_special_tokens=False))
