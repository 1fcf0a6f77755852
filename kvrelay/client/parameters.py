"""What can be asked, and its message. Values that no message can carry are refused here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import TypedDict, TypeVar

from kvrelay.errors import Rejected, Unavailable
from kvrelay.v1 import router_pb2, types_pb2

T = TypeVar("T")

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "min_tokens",
    "logprobs",
)
_KNOWN = {
    *_SAMPLING,
    "prompt",
    "messages",
    "token_ids",
    "output_token_ids",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "model",
    "request_id",
    "explain",
    "priority",
}


class Parameters(TypedDict, total=False):
    """Give one of ``prompt``, ``messages`` and ``token_ids``; what is ``None`` takes its default.

    ``messages`` are mappings with ``role`` and ``content``, or such pairs. ``max_tokens`` counts
    all output tokens (default 16), those in ``output_token_ids`` included, with which a stream is
    continued. ``seed`` is drawn when absent and told with the first piece. The meaning of the rest
    is in protos/types.proto. ``explain`` fills in ``missed`` in the usage of each leg: how many
    blocks were not found, and why. ``priority`` (-8 to 8) orders requests of one tenant that wait.
    """

    prompt: str | None
    messages: Sequence[Mapping[str, str] | tuple[str, str]] | None
    token_ids: Sequence[int] | None
    output_token_ids: Sequence[int] | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    min_tokens: int | None
    logprobs: int | None
    model: str | None
    request_id: str | None
    explain: bool | None
    priority: int | None


LONGEST_SECONDS = 1e8  # what gRPC can count; a longer wait is no limit


def seconds_of(timeout: float | None) -> float | None:
    """A timeout as gRPC takes it; below 0 it is over already, ``Rejected`` if it is no number."""
    if timeout is None or timeout > LONGEST_SECONDS:
        return None
    if math.isnan(timeout):
        raise Rejected("timeout", "must be a number of seconds, got nan")
    return timeout


def check_open(closed: bool) -> None:
    """``Unavailable`` once a client was closed."""
    if closed:
        raise Unavailable("this client is closed: make another one")


def request_of(ask: Parameters) -> router_pb2.GenerateRequest:
    """Raises ``Rejected`` naming the argument that cannot be sent."""
    values: Mapping[str, object] = {name: v for name, v in ask.items() if v is not None}
    for name in values.keys() - _KNOWN:
        raise TypeError(f"unexpected argument {name!r}")
    request = router_pb2.GenerateRequest()
    _set_input(request, ask)
    for name in ("max_tokens", "model", "request_id", "explain", "priority"):
        if name in values:
            _set(request, name, values[name])
    for name in _SAMPLING:
        if name in values:
            _set(request.sampling, name, values[name])
    _extend(request.output_token_ids, "output_token_ids", ask.get("output_token_ids"))
    _extend(request.sampling.stop_token_ids, "stop_token_ids", ask.get("stop_token_ids"))
    stop = ask.get("stop")
    _extend(request.sampling.stop, "stop", [stop] if isinstance(stop, str) else stop)
    return request


def _set_input(request: router_pb2.GenerateRequest, ask: Parameters) -> None:
    inputs = ("prompt", "messages", "token_ids")
    given = [name for name in inputs if ask.get(name) is not None]
    if len(given) != 1:
        raise Rejected("prompt", f"give one of {', '.join(inputs)}, got {given or 'none'}")
    if given == ["prompt"]:
        _set(request, "prompt", ask["prompt"])
    elif given == ["token_ids"]:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "token_ids", ask["token_ids"])
    else:
        request.chat.SetInParent()
        for index, turn in enumerate(ask["messages"] or ()):
            _add_turn(request.chat, f"messages[{index}]", turn)


def _add_turn(chat: router_pb2.Chat, field: str, turn: Mapping[str, str] | tuple[str, str]) -> None:
    try:
        role, content = (turn["role"], turn["content"]) if isinstance(turn, Mapping) else turn
    except (KeyError, TypeError, ValueError) as error:
        raise Rejected(field, f"needs a role and a content: {error!r}") from error
    message = chat.messages.add()
    for name, value in (("role", role), ("content", content)):
        try:
            setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise Rejected(f"{field}.{name}", f"cannot be sent: {error}") from error


def _set(
    message: router_pb2.GenerateRequest | types_pb2.Sampling, field: str, value: object
) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise Rejected(field, f"{value!r:.80} cannot be sent: {error}") from error


def _extend(target: MutableSequence[T], field: str, values: Iterable[T] | None) -> None:
    """Raises ``Rejected`` for the first element that does not fit."""
    for index, value in enumerate(_iterated(field, values)):
        try:
            target.append(value)
        except (TypeError, ValueError) as error:
            raise Rejected(f"{field}[{index}]", f"{value!r:.80} cannot be sent: {error}") from error


def _iterated(field: str, values: Iterable[T] | None) -> Iterable[T]:
    try:
        return () if values is None else iter(values)
    except TypeError as error:
        raise Rejected(field, f"{values!r:.80} is no sequence") from error
