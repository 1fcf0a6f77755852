"""What a client receives: an answer in chunks, or the whole answer as a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.client.convert import (
    FinishReason,
    Logprobs,
    call_delta_of,
    finish_reason_of,
    logprobs_of,
    usage_of,
)
from kvrelay.errors import Rejected, Unavailable
from kvrelay.sampling import MAX_SAMPLES, SEEDS
from kvrelay.tools import ToolCall, ToolCallDelta
from kvrelay.usage import Usage
from kvrelay.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and new text. Text that may be the start of a stop string is held back.

    ``finish_reason`` and ``usage`` are on the last chunk, ``seed`` and ``request_id`` on each.
    ``logprobs`` has one entry for each token if the request asked for them, and is else empty.
    With ``n`` answers, ``index`` says which of them it belongs to, and ``seed`` is that of this
    answer; each has a last chunk with a ``finish_reason``, and the very last one has the usage.
    ``tool_calls`` are the next parts of the calls that the answer makes, and ``reasoning`` is what
    the model thinks before it answers; neither is in ``text``.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    seed: int
    request_id: str
    index: int = 0
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``n`` answers. A request with its ``seed`` alone gives the same one."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    seed: int
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. ``choices`` are all ``n`` answers by index; this is the first of them.

    ``usage`` is that of the request: of all answers.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    request_id: str
    choices: tuple[Choice, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(slots=True)
class _Answer:
    """What was received of one answer; ``seed`` is ``None`` before its first message."""

    tokens: list[int]
    ended: bool = False
    seed: int | None = None


class ResumeState:
    """What one stream has received so far: enough to resume it."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        self._request = request
        self._first: router_pb2.GenerateResponse | None = None
        self._cached: int | None = None  # tokens of the prompt
        self._answers = [_Answer([]) for _ in range(min(max(request.n, 1), MAX_SAMPLES))]
        for answer, received in zip(self._answers, request.samples, strict=False):
            answer.ended = received.ended
        self.unanswered = request.ByteSize()  # bytes of the request until the first message

    @property
    def ended(self) -> bool:
        """Whether the last message of every answer has come: a later error loses nothing."""
        return all(answer.ended for answer in self._answers)

    def take(self, message: router_pb2.GenerateResponse) -> Chunk:
        """Record one message; ``Unavailable`` if it is of an answer that was not asked for."""
        self.unanswered = 0
        self._first = self._first or message  # it has the identifiers
        if message.HasField("cached_prompt_tokens"):
            self._cached = message.cached_prompt_tokens
        if message.index >= len(self._answers):
            raise Unavailable(f"the router sent answer {message.index} of {len(self._answers)}")
        answer = self._answers[message.index]
        if answer.seed is None:
            answer.seed = message.seed  # on its first message alone
        ids = tuple(token.id for token in message.tokens)
        answer.tokens += ids
        answer.ended = answer.ended or bool(message.finish_reason)
        return Chunk(
            text=message.text,
            token_ids=ids,
            logprobs=tuple(
                logprobs_of(token.logprobs)
                for token in message.tokens
                if token.HasField("logprobs")
            ),
            finish_reason=finish_reason_of(message.finish_reason),
            usage=usage_of(message.usage) if message.HasField("usage") else None,
            seed=answer.seed,
            request_id=self._first.request_id,
            index=message.index,
            tool_calls=tuple(map(call_delta_of, message.tool_calls)),
            reasoning=message.reasoning,
        )

    def continued(self) -> router_pb2.GenerateRequest:
        """The request that resumes after the tokens received; ``Rejected`` for an ended answer."""
        if self.ended:  # the text held back until the end would be repeated
            raise Rejected("stream", "its answer has ended: there is nothing to resume")
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resumes = True
        if len(self._answers) == 1:
            request.output_token_ids.extend(self._answers[0].tokens)
        else:
            self._add_samples(request)
        if self._first is not None:
            request.sampling.seed = (self._first.seed - self._first.index) % SEEDS
            request.weights = self._first.weights
            request.prompt_hash = self._first.prompt_hash
        if self._cached is not None:
            request.cached_prompt_tokens = self._cached
        return request

    def _add_samples(self, request: router_pb2.GenerateRequest) -> None:
        """A stream that was resumed before has the samples of its request already."""
        for index, answer in enumerate(self._answers):
            sample = request.samples[index] if self._request.samples else request.samples.add()
            sample.token_ids.extend(answer.tokens)
            sample.ended = answer.ended


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """Join the chunks of one stream; ``Unavailable`` if the last one is missing."""
    last = chunks[-1] if chunks else None
    if last is None or last.usage is None:
        raise Unavailable("the stream ended before the answer did")
    indices = sorted({chunk.index for chunk in chunks})
    choices = tuple(_choice([one for one in chunks if one.index == at]) for at in indices)
    first = choices[0]
    return Completion(
        text=first.text,
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        finish_reason=first.finish_reason,
        usage=last.usage,
        seed=first.seed,
        request_id=last.request_id,
        choices=choices,
        tool_calls=first.tool_calls,
        reasoning=first.reasoning,
    )


def _choice(chunks: Sequence[Chunk]) -> Choice:
    """Join the chunks of one answer."""
    last = chunks[-1]
    if last.finish_reason is None:
        raise Unavailable(f"the stream ended before answer {last.index} did")
    return Choice(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=last.finish_reason,
        seed=last.seed,
        tool_calls=_calls([delta for chunk in chunks for delta in chunk.tool_calls]),
        reasoning="".join(chunk.reasoning for chunk in chunks),
    )


def _calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Join the parts of each call; they come in order."""
    made: dict[int, ToolCall] = {}
    for delta in deltas:
        begun = made.get(delta.index, ToolCall(delta.id, delta.name, ""))
        made[delta.index] = replace(begun, arguments=begun.arguments + delta.arguments)
    return tuple(made.values())
