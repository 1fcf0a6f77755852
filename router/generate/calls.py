"""Reasoning and calls in an answer: from its text to the parts of a response."""

from __future__ import annotations

import hashlib

from kvrelay.text.reasoning import NOTHING, ReasoningParser
from kvrelay.text.tools import Part, ToolParser
from kvrelay.v1 import router_pb2, types_pb2
from router.generate.request import AcceptedRequest

ID_CHARS = 24


class AnswerReader:
    """Reads the text of one answer in order. The state follows from the text so far.

    The id of a call follows from prompt, seed and its place, so that a resumed answer has the same.
    """

    def __init__(self, request: AcceptedRequest) -> None:
        self._request = request
        use = request.tools
        self._calls = None if use is None else ToolParser(use.form, use.single)
        self._named = use is not None and use.named
        self._forced = use is not None and use.forced
        self._reasoning = ReasoningParser(request.reasoning) if request.reasoning else None

    def replay(self, text: str) -> None:
        """Read text that was sent before."""
        if self._reasoning is not None:
            text = self._reasoning.push(text).content
        if self._calls is not None:
            self._calls.push(text)

    def fill(self, response: router_pb2.GenerateResponse, text: str, last: bool = False) -> None:
        """Add new text to a response; ``last``: the answer ends with it."""
        if self._reasoning is not None:
            text = self._content(response, self._reasoning, text, last)
        if self._calls is None:
            response.text = text
            return
        parts = self._calls.push(text)
        if last and not self._forced:  # then it can only be a part of a call, which is no text
            parts += self._calls.flush()
        for part in parts:
            self._add(response, part)
        called = last and self._calls.calls and not (self._named or self._calls.in_call)
        if called and response.finish_reason == types_pb2.FINISH_REASON_STOP:
            response.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS

    @staticmethod
    def _content(
        response: router_pb2.GenerateResponse, parser: ReasoningParser, text: str, last: bool
    ) -> str:
        """Add the reasoning to a response. Returns the text that is none."""
        part = parser.push(text)
        rest = parser.flush() if last else NOTHING
        response.reasoning = part.reasoning + rest.reasoning
        return part.content + rest.content

    def _add(self, response: router_pb2.GenerateResponse, part: Part) -> None:
        if isinstance(part, str):
            response.text += part
            return
        calls = response.tool_calls
        if not calls or calls[-1].index != part.index:
            calls.add(index=part.index)
        call = calls[-1]
        if part.name:
            call.id = self._id(part.index)
            call.function.name = part.name
        call.function.arguments += part.arguments

    def _id(self, index: int) -> str:
        request = self._request
        source = f"{request.prompt_hash} {request.sampling.seed} {index}"
        return f"call_{hashlib.sha256(source.encode()).hexdigest()[:ID_CHARS]}"
