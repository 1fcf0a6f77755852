"""What a client receives: an answer in chunks, or the whole answer as a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.client.convert import (
    FinishReason,
    Logprobs,
    finish_reason_of,
    logprobs_of,
    usage_of,
)
from kvrelay.errors import Rejected, Unavailable
from kvrelay.usage import Usage
from kvrelay.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and new text. Text that may be the start of a stop string is held back.

    ``finish_reason`` and ``usage`` are on the last chunk, ``seed`` and ``request_id`` on each.
    ``logprobs`` has one entry for each token if the request asked for them, and is else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    seed: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    request_id: str


class ResumeState:
    """What one stream has received so far: enough to resume it."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._first: router_pb2.GenerateResponse | None = None
        self.ended = False  # set by the last message: a later error loses nothing
        self.unanswered = request.ByteSize()  # bytes of the request until the first message

    def take(self, message: router_pb2.GenerateResponse) -> Chunk:
        """Record one message."""
        self.unanswered = 0
        self._first = self._first or message  # it alone has the seed and the identifiers
        ids = tuple(token.id for token in message.tokens)
        self._tokens += ids
        self.ended = self.ended or bool(message.finish_reason)
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
            seed=self._first.seed,
            request_id=self._first.request_id,
        )

    def continued(self) -> router_pb2.GenerateRequest:
        """The request that resumes after the tokens received; ``Rejected`` for an ended answer."""
        if self.ended:  # the text held back until the end would be repeated
            raise Rejected("stream", "its answer has ended: there is nothing to resume")
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.output_token_ids.extend(self._tokens)
        if self._first is not None:
            request.sampling.seed = self._first.seed
            request.weights = self._first.weights
            request.prompt_hash = self._first.prompt_hash
        return request


def completion_of(chunks: Sequence[Chunk]) -> Completion:
    """Join the chunks of one stream; ``Unavailable`` if the last one is missing."""
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None or last.usage is None:
        raise Unavailable("the stream ended before the answer did")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage,
        seed=last.seed,
        request_id=last.request_id,
    )
