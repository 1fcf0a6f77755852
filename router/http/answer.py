"""One answer in the making: the positions of its choices, its usage, its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.v1 import router_pb2, types_pb2
from router.http.ask import AnswerForm
from router.http.resume import Resumption, SamplePosition, event_id
from router.http.shapes import DONE, AnswerChoice, AnswerShape, Json, usage_of

NOT_BEGUN = SamplePosition(0, begun=False)


class Answer:
    """Takes the responses of all prompts, those of each choice in order.

    ``stream`` identifies the events. ``echoes``: the text before the output of each prompt.
    """

    def __init__(
        self,
        form: AnswerForm,
        prompts: Sequence[Sequence[int]],
        shape: AnswerShape,
        stream: str,
        echoes: Sequence[str],
    ) -> None:
        self.form = form
        self.stream = stream
        self._prompts = prompts
        self._shape = shape
        self._echoes = [echo for echo in echoes for _ in range(form.samples)]
        self._choices = [AnswerChoice(text=echo) for echo in self._echoes]
        self._positions = [NOT_BEGUN] * form.choices
        self._accounts: dict[int, types_pb2.Usage] = {}  # of ended prompts
        self._told = False  # the client has the event with the usage

    def resume(self, resumption: Resumption) -> None:
        """Begin where a client has stopped."""
        self._positions = list(resumption.samples)
        self._told = resumption.told

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """Add a response to the whole answer."""
        self._choices[response.index].take(self._served(response))
        self._note(response)

    def whole(self) -> Json:
        """The whole answer."""
        return self._shape.whole(self._choices, self.usage())

    def usage(self) -> Json:
        """The accounts of the router once they have arrived, until then the tokens so far."""
        prompt, accounts = sum(map(len, self._prompts)), self._accounts.values()
        if len(accounts) < len(self._prompts):
            so_far = sum(position.tokens for position in self._positions)
            return usage_of(prompt, so_far, None)
        completion = sum(account.completion_tokens for account in accounts)
        known = all(account.HasField("cached_prompt_tokens") for account in accounts)
        cached = sum(account.cached_prompt_tokens for account in accounts) if known else None
        return usage_of(prompt, completion, cached)

    def events(self, response: router_pb2.GenerateResponse) -> str:
        """The events of one response; empty while there is nothing to show."""
        self._note_hit(response)
        index, before = response.index, self._positions[response.index]
        part = AnswerChoice()
        part.take(self._served(response))
        text = ""
        if not before.begun:
            self._positions[index] = replace(before, begun=True)
            first = self._shape.first(index, self._shown())
            text += "" if first is None else self._event(first)
            part.text = self._echoes[index] + part.text
        self._note(response)
        if before.ended:
            return text  # the client has its finish reason; this response repeats it
        shows = part.text or part.reasoning or part.calls or part.finish
        if shows or self.form.token_ids or self.form.logprobs:
            text += self._event(self._shape.chunk(index, part, self._shown()))
        return text

    def last_events(self) -> str:
        """The events after the last choice has ended."""
        if not self.form.usage or self._told:
            return DONE
        self._told = True
        return f"{self._event(self._shape.usage_chunk(self.usage()))}{DONE}"

    def _event(self, chunk: str) -> str:
        return f"id: {event_id(self._positions, self.stream, self._told)}\ndata: {chunk}\n\n"

    def _served(self, response: router_pb2.GenerateResponse) -> router_pb2.GenerateResponse:
        """The response, without reasoning if the client wants none."""
        if not self.form.reasoning:
            response.ClearField("reasoning")
        return response

    def _note(self, response: router_pb2.GenerateResponse) -> None:
        index, before = response.index, self._positions[response.index]
        ended = before.ended or bool(response.finish_reason)
        tokens = before.tokens + len(response.tokens)
        self._positions[index] = replace(before, tokens=tokens, ended=ended, begun=True)
        if response.HasField("usage"):
            self._accounts[index // self.form.samples] = response.usage

    def _note_hit(self, response: router_pb2.GenerateResponse) -> None:
        """Keep it at the first choice of the prompt, for the event ids."""
        if response.HasField("cached_prompt_tokens"):
            first = response.index // self.form.samples * self.form.samples
            position = self._positions[first]
            self._positions[first] = replace(position, hit=response.cached_prompt_tokens)

    def _shown(self) -> Json | bool | None:
        """``null`` in every chunk but the last if the client asked for usage, else nothing."""
        if not self.form.usage:
            return False
        return self.usage() if self.form.continuous else None
