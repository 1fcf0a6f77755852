"""One answer in the making: the positions of its samples, its usage, its events."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.v1 import router_pb2
from router.generate.request import AcceptedRequest
from router.http.ask import Ask
from router.http.resume import Resumption, SamplePosition, event_id
from router.http.shapes import AnswerChoice, AnswerShape, Json, usage_of

DONE = "data: [DONE]\n\n"


class Answer:
    """Takes the responses of a request in order. ``stream`` identifies its events."""

    def __init__(
        self, ask: Ask, request: AcceptedRequest, shape: AnswerShape, stream: str, echo: str
    ) -> None:
        self.ask = ask
        self._prompt = request.prompt
        self._shape = shape
        self._stream = stream
        self._echo = echo
        samples = ask.samples
        self._choices = [AnswerChoice(text=echo) for _ in range(samples)]
        self._positions = [SamplePosition(0) for _ in range(samples)]
        self._begun = [False] * samples
        self._resumed = False
        self._usage: Json | None = None

    def resume(self, resumption: Resumption) -> None:
        """Begin where a client has stopped: it has seen the beginning of every sample."""
        self._resumed = True
        self._positions = list(resumption.samples)
        self._begun = [True] * len(self._begun)

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """Add a response to the whole answer."""
        self._choices[response.index].take(response)
        self._note(response)

    def whole(self) -> Json:
        """The whole answer."""
        return self._shape.whole(self._choices, self.usage(), self._prompt)

    def usage(self) -> Json:
        """The account of the router once it has arrived, until then the tokens so far."""
        so_far = sum(position.tokens for position in self._positions)
        return self._usage or usage_of(len(self._prompt), so_far, None)

    def events(self, response: router_pb2.GenerateResponse) -> str:
        """The events of one response; empty while there is nothing to show."""
        index, before = response.index, self._positions[response.index]
        part = AnswerChoice()
        part.take(response)
        text = ""
        if not self._begun[index]:
            self._begun[index] = True
            first = self._shape.first(index, self._shown(self.usage()), self._prompt)
            text += "" if first is None else self._event(first)
            part.text = self._echo + part.text
        self._note(response)
        if before.ended:
            return text  # the client has its finish reason; this response repeats it
        if part.text or part.finish or self.ask.token_ids or self.ask.logprobs:
            text += self._event(self._shape.chunk(index, part, self._shown(self.usage())))
        return text

    def last_events(self) -> str:
        """The events after the last sample has ended."""
        if not self.ask.usage:
            return DONE
        return f"{self._event(self._shape.usage_chunk(self.usage()))}{DONE}"

    def _event(self, chunk: str) -> str:
        return f"id: {event_id(self._positions, self._stream)}\ndata: {chunk}\n\n"

    def _note(self, response: router_pb2.GenerateResponse) -> None:
        index, before = response.index, self._positions[response.index]
        ended = before.ended or bool(response.finish_reason)
        self._positions[index] = SamplePosition(before.tokens + len(response.tokens), ended)
        if response.HasField("usage"):
            account = response.usage
            cached = account.cached_prompt_tokens
            self._usage = usage_of(len(self._prompt), account.completion_tokens, cached)

    def _shown(self, usage: Json) -> Json | bool | None:
        """``null`` in every chunk but the last if the client asked for usage, else nothing."""
        if not self.ask.usage:
            return False
        return usage if self.ask.continuous else None


def reached(outputs: Sequence[Sequence[int]], samples: Sequence[SamplePosition]) -> bool:
    """Whether the outputs have all tokens that a client had received."""
    return all(len(one) >= at.tokens for one, at in zip(outputs, samples, strict=True))
