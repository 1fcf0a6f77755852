"""The parameters of a request, shared by every method that generates, and their message.

Values that protobuf cannot encode are rejected here.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import update_wrapper
from numbers import Real
from typing import Concatenate, ParamSpec, TypeVar

from kvrelay.errors import Rejected
from kvrelay.sampling import Sampling
from kvrelay.v1 import router_pb2, types_pb2

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

LONGEST_SECONDS = 1e8  # gRPC's longest timeout; a longer one means no limit
INPUTS = ("prompt", "messages", "token_ids")
HINTS: Mapping[str, str] = {
    "stream": "generate() always streams, complete() waits for the whole answer",
    "n": "one call makes one answer: call again with another seed",
    "best_of": "one call makes one answer: call again with another seed",
    "max_new_tokens": "use max_tokens, which counts output tokens only",
    "max_completion_tokens": "use max_tokens, which counts output tokens only",
    "max_length": "use max_tokens, which counts output tokens only",
    "do_sample": "temperature=0 takes the likeliest token, any other temperature samples",
    "input_ids": "use token_ids",
    "prompt_token_ids": "use token_ids",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "top_logprobs": "use logprobs, the number of likeliest tokens to report",
    "system": 'a system message is the first of messages: [("system", "..."), ("user", "...")]',
}
SAMPLING = (
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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Give one of ``prompt``, ``messages`` and ``token_ids``. ``None`` takes the default.

    timeout: seconds for the whole answer; default no limit.
    prompt: text. messages: mappings with ``role`` and ``content``, or pairs of them, rendered by
        the model's chat template. token_ids: a prompt that is already tokenized.
    output_token_ids: output tokens so far, to continue an answer; ``resume`` does it by itself.
    max_tokens: output tokens in all, those of ``output_token_ids`` included; default 16.
    sampling: a ``Sampling``; each of the following parameters replaces a field of it.
    temperature: 0 takes the likeliest token; default 1. top_k: sample from this many likeliest
        tokens. top_p: from the likeliest tokens that together have this probability. min_p: from
        tokens with at least this fraction of the likeliest one's probability. Default off.
    repetition_penalty, presence_penalty, frequency_penalty: as in vLLM; default off.
    seed: the same seed gives the same answer; drawn if absent, and returned with every chunk.
    stop, stop_token_ids: text and tokens that end the answer. ignore_eos: do not end at the
        end-of-sequence token. min_tokens: do not end before this many output tokens.
    logprobs: report the log probability of each token and of this many likeliest tokens.
    model: the model's name; ``NotFound`` if another is served. request_id: default drawn.
    explain: fill in ``missed`` in the usage of each leg: the blocks that were not found, and why.
    priority: -8 to 8; higher goes first among the waiting requests of one tenant.
    """

    _: KW_ONLY
    timeout: float | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, str] | tuple[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    output_token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    sampling: Sampling | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    model: str | None = None
    request_id: str | None = None
    explain: bool | None = None
    priority: int | None = None

    def message(self) -> router_pb2.GenerateRequest:
        """The protobuf message. Raises ``Rejected`` naming the parameter that cannot be sent."""
        request = router_pb2.GenerateRequest()
        self._set_input(request)
        for name in ("max_tokens", "model", "request_id", "explain", "priority"):
            _set(request, name, getattr(self, name))
        _extend(request.output_token_ids, "output_token_ids", self.output_token_ids)
        self._set_sampling(request.sampling)
        return request

    def _set_input(self, request: router_pb2.GenerateRequest) -> None:
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise Rejected("prompt", f"give one of {', '.join(INPUTS)}, got {given or 'none'}")
        if self.token_ids is not None:
            request.token_ids.SetInParent()
            _extend(request.token_ids.ids, "token_ids", self.token_ids)
        elif self.messages is not None:
            request.chat.SetInParent()
            for index, turn in enumerate(self.messages):
                _add_turn(request.chat, f"messages[{index}]", turn)
        else:
            _set(request, "prompt", self.prompt)

    def _set_sampling(self, message: types_pb2.Sampling) -> None:
        base = self.sampling
        if base is not None and not isinstance(base, Sampling):
            raise Rejected("sampling", f"must be a kvrelay.Sampling, got {base!r:.80}")
        if base is not None and base.eos_token_ids:
            raise Rejected("sampling.eos_token_ids", "comes from the model: leave it out")
        for name in SAMPLING:
            if base is not None:
                _set(message, name, getattr(base, name))
            _set(message, name, getattr(self, name))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        token_ids = self.stop_token_ids
        if base is not None:
            stop = base.stop if stop is None else stop
            token_ids = base.stop_token_ids if token_ids is None else token_ids
        _extend(message.stop, "stop", stop)
        _extend(message.stop_token_ids, "stop_token_ids", token_ids)


def seconds_of(timeout: float | None) -> float | None:
    """The timeout for gRPC, ``None`` for no limit. Raises ``Rejected`` if it is not a number."""
    if timeout is not None and not isinstance(timeout, Real):
        raise Rejected("timeout", f"must be a number of seconds, got {timeout!r:.80}")
    if timeout is None or timeout > LONGEST_SECONDS:
        return None
    if math.isnan(timeout):
        raise Rejected("timeout", "must be a number of seconds, got nan")
    return timeout


def takes_parameters(
    known: Callable[P, Parameters],
) -> Callable[[Callable[[S, Parameters], R]], Callable[Concatenate[S, P], R]]:
    """Gives a method the arguments of ``known``, and calls it with the ``Parameters`` they make.

    Type checkers and ``help`` see every parameter by name. An unknown argument raises ``TypeError``
    with a hint.
    """
    shown = list(inspect.signature(known, eval_str=True).parameters.values())
    names = [parameter.name for parameter in shown]

    def decorate(method: Callable[[S, Parameters], R]) -> Callable[Concatenate[S, P], R]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if args:
                raise TypeError("parameters are given by name, the prompt too: prompt=...")
            for name in kwargs.keys() - set(names):
                raise TypeError(f"unexpected argument {name!r}: {_hint(name, names)}")
            return method(self, known(*args, **kwargs))

        update_wrapper(call, method)
        own = inspect.signature(method, eval_str=True)
        signature = own.replace(parameters=[*list(own.parameters.values())[:1], *shown])
        setattr(call, "__signature__", signature)  # noqa: B010 - functions declare no such attribute
        call.__doc__ = f"{inspect.getdoc(method)}\n\n{inspect.getdoc(known)}"
        return call

    return decorate


def _hint(name: str, known: Sequence[str]) -> str:
    """The advice for an argument that does not exist."""
    if name in HINTS:
        return HINTS[name]
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"the parameters are {', '.join(known)}"


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
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise Rejected(field, f"{value!r:.80} cannot be sent: {error}") from error


def _extend(target: MutableSequence[T], field: str, values: Iterable[T] | None) -> None:
    """``Rejected`` names the first element that cannot be sent."""
    if values is None:
        return
    try:
        elements = iter(values)
    except TypeError as error:
        raise Rejected(field, f"{values!r:.80} is not a sequence") from error
    for index, value in enumerate(elements):
        try:
            target.append(value)
        except (TypeError, ValueError) as error:
            raise Rejected(f"{field}[{index}]", f"{value!r:.80} cannot be sent: {error}") from error
