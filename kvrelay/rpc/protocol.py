"""What the router and the workers agree on: the protocol's version, worker roles, shared fields.

``PROTOCOL`` is the version of the messages between our processes; processes of different versions
do not work together. It grows when the meaning of the same bytes changes, and with a field that an
older worker must not ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvrelay.errors import Rejected
from kvrelay.fleet import WorkerRole
from kvrelay.sampling import Sampling
from kvrelay.structured import FIELD, ReasoningStart, StructuredOutput
from kvrelay.v1 import router_pb2, types_pb2

PROTOCOL = 3
CONVERTED = (
    "stop",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "bad_word_ids",
    "structured_output",
)
"""Fields of ``Sampling`` whose values the message holds in another form."""

Role: TypeAlias = "types_pb2.Role.ValueType"  # quoted: it is in the type stubs only
NAMES: dict[Role, WorkerRole] = {
    types_pb2.ROLE_PREFILL: "prefill",
    types_pb2.ROLE_DECODE: "decode",
}
ROLES: dict[str, Role] = {name: role for role, name in NAMES.items()}
SERVICES: dict[Role, str] = {
    types_pb2.ROLE_PREFILL: "kvrelay.v1.PrefillService",
    types_pb2.ROLE_DECODE: "kvrelay.v1.DecodeService",
}
RETENTIONS: Mapping[str, router_pb2.Retention.ValueType] = {
    "turn_ends": router_pb2.RETENTION_TURN_ENDS,
    "tool_call": router_pb2.RETENTION_TOOL_CALL,
}
REASONING: Mapping[types_pb2.Reasoning.ValueType, ReasoningStart] = {
    types_pb2.REASONING_UNSPECIFIED: "",
    types_pb2.REASONING_OPTIONAL: "optional",
    types_pb2.REASONING_OPEN: "open",
}
REASONING_VALUES = {name: value for value, name in REASONING.items()}


def role_name(role: Role) -> str:
    """The name in flags, logs and tables; ``unspecified`` for a worker that reported no role."""
    return NAMES.get(role, "unspecified")


def sampling_of(message: types_pb2.Sampling, eos_token_ids: Sequence[int] = ()) -> Sampling:
    """The sampling parameters of a message and the model's end tokens; defaults where absent."""
    given = {f.name: value for f, value in message.ListFields() if f.name not in CONVERTED}
    # A zero that was given explicitly is listed too: every scalar field is `optional`.
    return Sampling(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(eos_token_ids),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(tuple(sequence.ids) for sequence in message.bad_word_ids),
        structured_output=structured_of(message.structured_output)
        if message.HasField("structured_output")
        else None,
    )


@dataclass(frozen=True, slots=True)
class EndingTokens:
    """Tokens that end an output once it has ``allowed_after`` tokens."""

    ids: frozenset[int]
    allowed_after: int

    def ends(self, index: int, token: int) -> bool:
        """Whether ``token``, at ``index`` of the output, ends it."""
        return index >= self.allowed_after and token in self.ids


def ending_of(message: types_pb2.Sampling, eos_token_ids: Sequence[int]) -> EndingTokens:
    """The tokens that end a request's output. Reads only these fields: the message may be large."""
    structured = StructuredOutput() if message.HasField("structured_output") else None
    sampling = Sampling(
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(eos_token_ids),
        ignore_eos=message.ignore_eos,
        structured_output=structured,
    )
    # A grammar ends its text itself, regardless of min_tokens.
    allowed_after = message.min_tokens if structured is None else 0
    return EndingTokens(frozenset(sampling.ending_token_ids), allowed_after)


def structured_of(message: types_pb2.StructuredOutput) -> StructuredOutput:
    """What the output must be; ``check`` refuses one without a constraint."""
    given = message.WhichOneof("constraint")
    wanted = StructuredOutput()
    if given == "choice":
        wanted = StructuredOutput(choice=tuple(message.choice.texts))
    elif given is not None:
        wanted = StructuredOutput(**{given: getattr(message, given)})
    return replace(
        wanted,
        disable_any_whitespace=message.disable_any_whitespace,
        reasoning=REASONING.get(message.reasoning, ""),
        calls=message.calls,
    )


def structured_message(wanted: StructuredOutput) -> types_pb2.StructuredOutput:
    """The message of what an output must be. Raises ``Rejected`` if it cannot be sent."""
    wanted.check()
    kind = wanted.kind
    message = types_pb2.StructuredOutput(
        disable_any_whitespace=wanted.disable_any_whitespace,
        reasoning=REASONING_VALUES[wanted.reasoning],
        calls=wanted.calls,
    )
    try:
        if kind == "choice":
            message.choice.texts.extend(wanted.choice)
        else:
            setattr(message, kind, getattr(wanted, kind))
    except (TypeError, ValueError) as error:
        raise Rejected(f"{FIELD}.{kind}", f"must be text: {error}") from None
    return message


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``Rejected`` naming the first id of ``field`` that is outside the vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise Rejected(
            f"{field}[{index}]", f"{ids[index]} is outside the vocabulary of {vocab_size}"
        )
