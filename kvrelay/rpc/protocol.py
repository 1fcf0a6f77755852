"""What the router and the workers agree on: the protocol's version, worker roles, shared fields.

``PROTOCOL`` is the version of the messages between our processes; processes of different versions
do not work together. It grows when the meaning of the same bytes changes; a new field needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvrelay.errors import Rejected
from kvrelay.fleet import WorkerRole
from kvrelay.sampling import Sampling
from kvrelay.v1 import types_pb2

PROTOCOL = 1

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


def role_name(role: Role) -> str:
    """The name in flags, logs and tables; ``unspecified`` for a worker that reported no role."""
    return NAMES.get(role, "unspecified")


def sampling_of(message: types_pb2.Sampling, eos_token_ids: Sequence[int] = ()) -> Sampling:
    """The sampling parameters of a message and the model's end tokens; defaults where absent."""
    lists = ("stop", "stop_token_ids", "logit_bias", "bad_words", "bad_word_ids")
    given = {f.name: value for f, value in message.ListFields() if f.name not in lists}
    # A zero that was given explicitly is listed too: every scalar field is `optional`.
    return Sampling(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(eos_token_ids),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(message.bad_words),
        bad_word_ids=tuple(tuple(sequence.ids) for sequence in message.bad_word_ids),
    )


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``Rejected`` naming the first id of ``field`` that is outside the vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise Rejected(
            f"{field}[{index}]", f"{ids[index]} is outside the vocabulary of {vocab_size}"
        )
