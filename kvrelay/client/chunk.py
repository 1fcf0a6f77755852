"""What a client gets: pieces of an answer as they come, or the whole as a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.errors import Rejected, Unavailable
from kvrelay.v1 import router_pb2, types_pb2

FinishReason = Literal["stop", "length"]
_FINISH: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and new text; text waits while it may be the beginning of a stop string.

    ``finish_reason`` and ``usage`` are on the last piece, ``seed`` and ``request_id`` on each.
    ``logprobs`` has one entry for each token when they were asked for, else none.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.Logprobs, ...]
    finish_reason: FinishReason | None
    usage: types_pb2.Usage | None
    seed: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.Logprobs, ...]
    finish_reason: FinishReason
    usage: types_pb2.Usage
    seed: int
    request_id: str


class ResumeState:
    """What came so far over one stream: enough to go on from there."""

    def __init__(self, request: router_pb2.GenerateRequest) -> None:
        self._request = request
        self._tokens: list[int] = []
        self._id = request.request_id
        self._seed = request.sampling.seed
        self._weights = request.weights
        self._prompt_hash = request.prompt_hash
        self._known = False
        self.ended = False  # with the last message: whatever fails after it, the answer is whole
        self.unanswered = request.ByteSize()  # bytes of a request of which nothing came yet

    def take(self, message: router_pb2.GenerateResponse) -> Chunk:
        """Book one message."""
        self.unanswered = 0
        if message.HasField("seed"):
            self._id = message.request_id
            self._seed = message.seed
            self._known = True
            self._weights = message.weights
            self._prompt_hash = message.prompt_hash
        ids = tuple(token.id for token in message.tokens)
        self._tokens += ids
        self.ended = self.ended or bool(message.finish_reason)
        return Chunk(
            text=message.text,
            token_ids=ids,
            logprobs=tuple(t.logprobs for t in message.tokens if t.HasField("logprobs")),
            finish_reason=_FINISH.get(message.finish_reason),
            usage=message.usage if message.HasField("usage") else None,
            seed=self._seed,
            request_id=self._id,
        )

    def continued(self) -> router_pb2.GenerateRequest:
        """The same request from the tokens received on; ``Rejected`` once the answer has ended."""
        if self.ended:  # the text that was held back to its end would come twice
            raise Rejected("stream", "its answer has ended: there is nothing to go on with")
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.output_token_ids.extend(self._tokens)
        if self._known:
            request.sampling.seed = self._seed
            request.weights = self._weights
            request.prompt_hash = self._prompt_hash
        return request


def completion_of(pieces: Sequence[Chunk]) -> Completion:
    """The pieces of one stream together; ``Unavailable`` when it ended without its end."""
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None or last.usage is None:
        raise Unavailable("the stream ended before the answer did")
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage,
        seed=last.seed,
        request_id=last.request_id,
    )
