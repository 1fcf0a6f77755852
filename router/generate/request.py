"""A request that passed every check, and the checks. They precede any work and name the field."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import xxhash

from kvrelay.errors import Mismatch, NotFound, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import check_ids, sampling_of
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.tracing import OFF, Span
from kvrelay.sampling import DEFAULT_MAX_TOKENS, MAX_SAMPLES, SEEDS, stored_positions
from kvrelay.structured import ReasoningStart
from kvrelay.v1 import router_pb2, types_pb2, worker_pb2
from router.queue.fair import HIGHEST, LOWEST
from router.queue.inbox import Read, Sender
from router.queue.tools import ToolUse
from router.workers.fleet import same_but_numerics, weights_of

MAX_REQUEST_ID_CHARS = 128
NO_TENANT = Tenant()
MAX_MESSAGES = 4096
OTHER_PROMPT = (
    "the stream began with other prompt tokens: the tokenizer, the chat template or the date in the"
    " template has changed: start it again"
)
CACHE_SALT = b"kvrelay.cache-salt.v1\0"


@dataclass(frozen=True, slots=True)
class ReceivedSample:
    """The output of one sample that the client has, and whether it is whole."""

    outputs: tuple[int, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """The input of every leg. ``sampling`` carries the seed; ``outputs`` are tokens so far.

    ``prompt_hash`` is sent to the client, which sends it back to resume.
    ``received_at`` is a time of ``time.monotonic``. ``samples``: what the client has of each, if
    there are several; ``split`` makes a request of each, whose index is ``sample``. One that
    ``regenerates`` makes again what its client has: nothing of it goes out. One that ``resumes`` an
    earlier call has its ``hit``, tokens of the prompt that were cached then, if it is known.
    """

    id: str
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    max_tokens: int
    sampling: types_pb2.Sampling
    deadline: Deadline
    explain: bool = False  # each leg reports why blocks were missed
    tenant: Tenant = NO_TENANT
    priority: int = 0
    prompt_hash: int = 0
    received_at: float = 0.0
    regenerates: bool = False
    hit: int | None = None
    resumes: bool = False
    sample: int = 0
    samples: tuple[ReceivedSample, ...] = ()
    retention: router_pb2.Retention.ValueType = router_pb2.RETENTION_UNSPECIFIED
    tools: ToolUse | None = None  # if the text of the answer may have calls
    reasoning: ReasoningStart = ""
    span: Span = OFF

    @property
    def outputs_field(self) -> str:
        """The field of the message that has ``outputs``."""
        return "output_token_ids" if not self.samples else f"samples[{self.sample}].token_ids"

    @property
    def positions(self) -> int:
        """Positions that it stores on a worker at most (D5)."""
        return stored_positions(len(self.prompt), self.max_tokens)

    @property
    def part(self) -> float:
        """The fraction of its output still to be generated."""
        return 1.0 - len(self.outputs) / self.max_tokens


@dataclass(frozen=True, slots=True, eq=False)
class InboundCall:
    """One call at a door of the router, gRPC or HTTP: both meet here.

    ``read`` receives the message, when there is memory for it. A call that is ``counted`` needs
    none: its message is part of one that is being received. ``accepted`` is set when the request
    has passed every check. ``span``: the span of the HTTP or gRPC request.
    """

    sender: Sender
    deadline: Deadline
    read: Read
    counted: bool = False
    span: Span = OFF
    accepted: asyncio.Future[AcceptedRequest] = field(default_factory=asyncio.Future)

    @property
    def tenant(self) -> Tenant:
        return self.sender.tenant


def most_tokens(prompt: int, longest: int, tenant: Tenant, samples: int = 1) -> int:
    """The most output tokens of each sample, on the largest worker and within a minute's quota."""
    room = longest - prompt + 1
    if tenant.tokens_per_minute is not None:
        room = min(room, (tenant.tokens_per_minute - prompt) // samples)
    return max(room, 1)


def salted(tenant: Tenant, cache_salt: str) -> Tenant:
    """The tenant with a salt of its own for the blocks of these requests."""
    if not cache_salt:
        return tenant
    parts = CACHE_SALT, tenant.salt, cache_salt.encode()
    return replace(tenant, salt=hashlib.sha256(b"".join(parts)).digest())


def is_request_id(text: str) -> bool:
    """Whether a client may name a request so: the name is written to logs and headers."""
    return 1 <= len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


def check_request_id(text: str, field: str = "request_id") -> None:
    """Raises ``Rejected`` for ``field`` if this cannot be the id of a request."""
    if not is_request_id(text):
        raise Rejected(field, f"must have 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")


def check_turns(count: int) -> None:
    """Raises ``Rejected`` for more messages than a conversation may have."""
    if count > MAX_MESSAGES:
        raise Rejected("chat.messages", f"at most {MAX_MESSAGES}")


def check_tokenizable(message: router_pb2.GenerateRequest, model: str) -> None:
    """The checks of a message whose input is only tokenized; the input may be empty."""
    if message.model and message.model != model:
        raise NotFound(f"model: {message.model!r} is not served here, {model!r} is")
    check_turns(len(message.chat.messages))


def check_envelope(message: router_pb2.GenerateRequest, model: str) -> None:
    """The checks that need neither prompt tokens nor workers."""
    check_tokenizable(message, model)
    if not LOWEST <= message.priority <= HIGHEST:
        raise Rejected("priority", f"must be {LOWEST} to {HIGHEST}, got {message.priority}")
    if message.retention not in router_pb2.Retention.values():
        known = ", ".join(router_pb2.Retention.keys())
        raise Rejected("retention", f"{message.retention} is unknown here; known: {known}")
    _check_input(message)
    max_tokens, so_far = max_tokens_of(message), len(message.output_token_ids)
    if max_tokens < 1:
        raise Rejected("max_tokens", f"must be at least 1, got {max_tokens}")
    if so_far > max_tokens:
        raise Rejected("output_token_ids", f"{so_far} tokens so far, but max_tokens {max_tokens}")
    sampling = message.sampling
    if sampling.min_tokens > max_tokens:
        raise Rejected(
            "sampling.min_tokens", f"{sampling.min_tokens} is more than max_tokens {max_tokens}"
        )
    _check_samples(message, max_tokens)
    random = not sampling.HasField("temperature") or sampling.temperature > 0
    so_far += sum(len(sample.token_ids) for sample in message.samples)
    if so_far and random and not sampling.HasField("seed"):
        raise Rejected("sampling.seed", "missing: to continue, give the seed of the first response")


def _check_samples(message: router_pb2.GenerateRequest, max_tokens: int) -> None:
    count, samples = samples_of(message), message.samples
    if not 1 <= count <= MAX_SAMPLES:
        raise Rejected("n", f"must be 1 to {MAX_SAMPLES}, got {count}")
    if count > 1 and message.output_token_ids:
        raise Rejected("output_token_ids", f"is for one sample, and n is {count}: give samples")
    if not samples:
        return
    if count == 1 or len(samples) != count:
        raise Rejected(
            "samples", f"must be one for each of n > 1, got {len(samples)} for n {count}"
        )
    for index, sample in enumerate(samples):
        if len(sample.token_ids) > max_tokens:
            raise Rejected(
                f"samples[{index}].token_ids",
                f"{len(sample.token_ids)} tokens so far, but max_tokens {max_tokens}",
            )
    if all(sample.ended for sample in samples):
        raise Rejected("samples", "have all ended: there is nothing to resume")


def samples_of(message: router_pb2.GenerateRequest) -> int:
    """``n`` of the request, or the default."""
    return message.n if message.HasField("n") else 1


def is_resumed(message: router_pb2.GenerateRequest) -> bool:
    """Whether the client has a response to the request, or the weights of one."""
    return _has_output(message) or bool(message.weights)


def _has_output(message: router_pb2.GenerateRequest) -> bool:
    ended = any(one.token_ids or one.ended for one in message.samples)
    return bool(message.output_token_ids) or ended


def max_tokens_of(message: router_pb2.GenerateRequest) -> int:
    """``max_tokens`` of the request, or the default."""
    return message.max_tokens if message.HasField("max_tokens") else DEFAULT_MAX_TOKENS


def _check_input(message: router_pb2.GenerateRequest) -> None:
    match message.WhichOneof("input"):
        case "prompt" if not message.prompt:
            raise Rejected("prompt", "is empty")
        case "token_ids" if not message.token_ids.ids:
            raise Rejected("token_ids", "is empty")
        case None:
            raise Rejected("prompt", "missing: give a prompt, token_ids or chat messages")


def check_length(message: router_pb2.GenerateRequest, longest: int) -> None:
    """Refuse more ids than the model has positions, before each of them is checked."""
    for name, count in (
        ("token_ids.ids", len(message.token_ids.ids)),
        ("output_token_ids", len(message.output_token_ids)),
        *(
            (f"samples[{index}].token_ids", len(sample.token_ids))
            for index, sample in enumerate(message.samples)
        ),
    ):
        if count > longest:
            said = f"{count} ids, and the model has {longest} positions: send fewer"
            raise Rejected(name, said)


def _other_weights(began: str, served: worker_pb2.Namespace) -> str:
    """Why a stream cannot be resumed: its weights, or their numeric profile, are not served."""
    if not same_but_numerics(began, served):
        return (
            f"the stream began with {began!r}, and {weights_of(served)!r} are served now: start it"
            " again, or resume it where its weights are served by workers of its numeric profile"
        )
    profile = began.removeprefix(f"{served.revision}/{served.dtype}").lstrip("/") or "loose"
    return (
        f"the stream began on numeric profile {profile!r}, and no decode worker of this profile can"
        f" be used now: resume it later, or at a router with such workers, or start it again on"
        f" {weights_of(served)!r}"
    )


def build(
    message: router_pb2.GenerateRequest,
    prompt: tuple[int, ...],
    bad_words: Sequence[Sequence[int]],
    info: worker_pb2.WorkerInfo,
    deadline: Deadline,
    tenant: Tenant,
) -> AcceptedRequest:
    """The request, after the checks that need to know what the fleet serves.

    ``bad_words`` are the token sequences of ``sampling.bad_words``.
    """
    vocab_size, weights = info.vocab_size, weights_of(info.namespace)
    if message.weights not in ("", weights):  # the tokens so far are another model's
        raise Mismatch("weights", _other_weights(message.weights[:200], info.namespace))
    if not prompt:
        raise Rejected("prompt", "has no tokens")
    check_ids("token_ids.ids", prompt, vocab_size)
    prompt_hash = xxhash.xxh3_64_intdigest(array("I", prompt).tobytes())
    if message.prompt_hash not in (0, prompt_hash):
        raise Mismatch("prompt_hash", OTHER_PROMPT)
    hit = message.cached_prompt_tokens if message.HasField("cached_prompt_tokens") else None
    if hit is not None and hit > len(prompt):
        raise Rejected(
            "cached_prompt_tokens", f"must be at most the prompt's {len(prompt)} tokens, got {hit}"
        )
    check_ids("output_token_ids", message.output_token_ids, vocab_size)
    for index, sample in enumerate(message.samples):
        check_ids(f"samples[{index}].token_ids", sample.token_ids, vocab_size)
    sampling = types_pb2.Sampling()
    sampling.CopyFrom(message.sampling)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    sampling_of(sampling).check(vocab_size)
    for ids in bad_words:
        check_ids("sampling.bad_words", ids, vocab_size)
        sampling.bad_word_ids.add(ids=ids)
    sampling.ClearField("bad_words")
    return AcceptedRequest(
        id=message.request_id or secrets.token_hex(8),
        prompt=prompt,
        outputs=tuple(message.output_token_ids),
        max_tokens=max_tokens_of(message),
        sampling=sampling,
        deadline=deadline,
        explain=message.explain,
        tenant=tenant,
        priority=message.priority,
        prompt_hash=prompt_hash,
        hit=hit,
        resumes=message.resumes or _has_output(message),
        samples=_received(message),
        retention=message.retention,
    )


def _received(message: router_pb2.GenerateRequest) -> tuple[ReceivedSample, ...]:
    """Copies: a part of a message would keep the whole message."""
    if (count := samples_of(message)) == 1:
        return ()
    if not message.samples:
        return (ReceivedSample(),) * count
    return tuple(ReceivedSample(tuple(one.token_ids), one.ended) for one in message.samples)


def split(request: AcceptedRequest) -> list[AcceptedRequest]:
    """The request of each sample that has not ended: its seed is ``seed + sample``."""
    made = []
    for index, received in enumerate(request.samples):
        if not received.ended:
            sampling = types_pb2.Sampling()
            sampling.CopyFrom(request.sampling)
            sampling.seed = (request.sampling.seed + index) % SEEDS
            outputs = received.outputs
            made.append(replace(request, sample=index, sampling=sampling, outputs=outputs))
    return made
