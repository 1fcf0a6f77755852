"""Event ids, with which a client resumes a broken stream: the position and what it is bound to.

An id is ``POSITIONS-TOKEN-SUM``: output tokens received of each choice, empty before its first
event, after ``h`` the cached tokens of the prompt of which it is the first choice, with ``e`` once
its finish reason was received, and a last ``u`` once the usage was; what identifies the stream; and
a checksum of both. The token binds the tenant, the fields of the body that decide the tokens, the
seed, the prompt's tokens, and the weights with their numeric profile. It holds no output: a client
that sends only the id lets the router generate these tokens again, which are the same ones.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvrelay.errors import Mismatch, Rejected
from kvrelay.v1 import router_pb2
from router.generate.request import AcceptedRequest, is_request_id

HEADER = "last-event-id"
DIGEST_BYTES = 8
MAX_CHARS = 4096
_LAYOUT = struct.Struct(f"<QQQiB{DIGEST_BYTES}s{DIGEST_BYTES}s")
_LATEST = 1 << 40  # seconds since 1970
ENDED = "e"
HIT = "h"
TOLD = "u"


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """What a client has of one sample; ``hit``: cached tokens of the prompt, if it is known."""

    tokens: int
    ended: bool = False
    begun: bool = True
    hit: int | None = None

    def __str__(self) -> str:
        if not self.begun:
            return ""
        hit = "" if self.hit is None else f"{HIT}{self.hit}"
        return f"{self.tokens}{hit}{ENDED if self.ended else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamId:
    """The part of an event id that all events of a stream share."""

    seed: int
    prompt_hash: int
    created: int
    max_tokens: int
    body: bytes  # digest of the request
    weights: bytes  # digest of the weights and profile
    request_id: str

    def __str__(self) -> str:
        numbers = self.seed, self.prompt_hash, self.created, self.max_tokens, len(self.request_id)
        raw = _LAYOUT.pack(*numbers, self.body, self.weights) + self.request_id.encode()
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class Resumption:
    """A parsed event id. ``told``: the client has the event with the usage, which is the last."""

    stream: StreamId
    samples: tuple[SamplePosition, ...]
    told: bool = False

    def check(self, body: bytes) -> None:
        """Raise ``Mismatch`` if the stream belongs to another request."""
        if body != self.stream.body:
            raise Mismatch(
                HEADER, "the stream began with another request: send the same body, or no id"
            )


def parse_event_id(text: str, samples: int) -> Resumption:
    """Raises ``Rejected`` for a text that is no id of a request with so many samples."""
    content, _, _ = text.rpartition("-")
    positions, _, token = content.partition("-")
    try:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        if text != with_checksum(content):
            raise ValueError("damaged")
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        seed, prompt_hash, created, max_tokens, size, body, weights = _LAYOUT.unpack_from(raw)
        if created >= _LATEST:
            raise ValueError("no time")
        told = positions.endswith(TOLD)
        parsed = tuple(map(_position, positions.removesuffix(TOLD).split(".")))
        if told and not all(at.ended for at in parsed):
            raise ValueError("usage before the end")
        request_id = raw[_LAYOUT.size :].decode("ascii")
        if len(request_id) != size or not is_request_id(request_id):
            raise ValueError("not an id that a request can have")
        stream = StreamId(
            seed=seed,
            prompt_hash=prompt_hash,
            created=created,
            max_tokens=max_tokens,
            body=body,
            weights=weights,
            request_id=request_id,
        )
    except (ValueError, struct.error, binascii.Error):
        said = f"{text:.60} is no id of an event of this server"
        advice = "send that of the last event, or leave the header out"
        raise Rejected(HEADER, f"{said}: {advice}") from None
    if len(parsed) != samples:
        raise Mismatch(
            HEADER, f"has positions of {len(parsed)} answers, and the request asks for {samples}"
        )
    return Resumption(stream, parsed, told)


def _position(text: str) -> SamplePosition:
    if not text:
        return SamplePosition(0, begun=False)
    tokens, known, hit = text.removesuffix(ENDED).partition(HIT)
    cached = _number(hit) if known else None
    return SamplePosition(_number(tokens), text.endswith(ENDED), hit=cached)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError(text)
    return int(text)


def event_id(positions: Sequence[SamplePosition], stream: str, told: bool = False) -> str:
    """The id of an event, after which the client has these positions, and the usage if ``told``."""
    return with_checksum(f"{'.'.join(map(str, positions))}{TOLD if told else ''}-{stream}")


def with_checksum(content: str) -> str:
    """The id with this content: damage must not lead into another stream."""
    return f"{content}-{xxhash.xxh3_64_hexdigest(content.encode())[:8]}"


def digest(content: bytes) -> bytes:
    """Of a request, or of weights."""
    return hashlib.sha256(content).digest()[:DIGEST_BYTES]


def request_digest(messages: Sequence[router_pb2.GenerateRequest], tenant: str) -> bytes:
    """Digest of the tenant and of all fields that decide the output.

    Request id, priority and the tokens so far are left out. The tenant is in it, so that an event
    id of one tenant never fits a request of another.
    """
    digests = [digest(tenant.encode())]
    for message in messages:
        copy = router_pb2.GenerateRequest()
        copy.CopyFrom(message)
        copy.ClearField("request_id")
        copy.ClearField("priority")
        copy.ClearField("output_token_ids")
        digests.append(digest(copy.SerializeToString(deterministic=True)))
    return digest(b"".join(digests))


def has_reached(outputs: Sequence[Sequence[int]], samples: Sequence[SamplePosition]) -> bool:
    """Whether the outputs have all tokens that a client had received."""
    return all(len(one) >= at.tokens for one, at in zip(outputs, samples, strict=True))


def set_outputs(
    message: router_pb2.GenerateRequest,
    outputs: Sequence[Sequence[int]],
    samples: Sequence[SamplePosition],
) -> None:
    """Give a message the tokens so far, so that its samples continue after them.

    If all samples have ended, the last one ends again, for its usage.
    """
    message.ClearField("output_token_ids")
    if len(outputs) == 1:
        message.output_token_ids.extend(outputs[0])
        return
    for tokens, at in zip(outputs, samples, strict=True):
        message.samples.add(token_ids=tokens, ended=at.ended)
    if all(at.ended for at in samples):
        message.samples[-1].ended = False


def hash_of(requests: Sequence[AcceptedRequest]) -> int:
    """The hash of the tokens of all prompts of one HTTP request."""
    if len(requests) == 1:
        return requests[0].prompt_hash
    return xxhash.xxh3_64_intdigest(array("Q", [one.prompt_hash for one in requests]).tobytes())
