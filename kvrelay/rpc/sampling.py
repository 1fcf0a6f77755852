"""What the router and the workers both read of a request: its sampling, and checks of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.errors import Rejected
from kvrelay.sampling import Sampling
from kvrelay.v1 import types_pb2


def sampling_of(message: types_pb2.Sampling, eos_token_ids: Sequence[int] = ()) -> Sampling:
    """The record of a message, with the model's ends; absent fields take its defaults."""
    lists = ("stop", "stop_token_ids")
    given = {f.name: value for f, value in message.ListFields() if f.name not in lists}
    # A zero that was given explicitly is listed too: every scalar field is `optional`.
    return Sampling(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(eos_token_ids),
    )


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``Rejected`` naming the first id of ``field`` that is outside the vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise Rejected(
            f"{field}[{index}]", f"{ids[index]} is outside the vocabulary of {vocab_size}"
        )
