"""The parameters of a request, shared by every method that generates, and their message.

A value that cannot be sent is rejected here, by the name of its parameter.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import update_wrapper
from numbers import Real
from typing import Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from kvrelay.client.structured import set_structured
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.rpc.protocol import RETENTIONS
from kvrelay.rpc.tool_messages import set_calls, set_tools
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput
from kvrelay.v1 import router_pb2, types_pb2

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
RequestPart: TypeAlias = (
    "router_pb2.GenerateRequest | router_pb2.Chat | router_pb2.ChatMessage | router_pb2.TokenIds"
    " | types_pb2.Sampling | types_pb2.TokenSequence"
)

LONGEST_SECONDS = 1e8  # gRPC's longest timeout; a longer one means no limit
INPUTS = ("prompt", "messages", "token_ids")
OF_CHATS = ("chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls")
HINTS: Mapping[str, str] = {
    "stream": "generate() always streams, complete() waits for the whole answer",
    "best_of": "use n and choose among the answers",
    "max_new_tokens": "use max_tokens, which counts output tokens only",
    "max_completion_tokens": "use max_tokens, which counts output tokens only",
    "max_length": "use max_tokens, which counts output tokens only",
    "do_sample": "temperature=0 takes the likeliest token, any other temperature samples",
    "input_ids": "use token_ids",
    "prompt_token_ids": "use token_ids",
    "stop_sequences": "use stop",
    "stop_strings": "use stop",
    "structured_outputs": "use structured_output",
    "guided_json": 'use structured_output={"json": ...}',
    "guided_regex": 'use structured_output={"regex": ...}',
    "guided_choice": 'use structured_output={"choice": [...]}',
    "guided_grammar": 'use structured_output={"grammar": ...}',
    "top_logprobs": "use logprobs, the number of likeliest tokens to report",
    "system": 'a system message is the first of messages: [("system", "..."), ("user", "...")]',
}
PLAIN = ("n", "max_tokens", "model", "request_id", "explain", "priority", "output_token_ids")
SPECIAL = ("eos_token_ids", "logit_bias", "bad_word_ids", "structured_output")
SAMPLING = tuple(field.name for field in fields(Sampling) if field.name not in SPECIAL)
ONE_OR_MORE = ("stop", "bad_words")
Retention = Literal["turn_ends", "tool_call"]
TURN = "a mapping with role and content, or a pair of them"
BIASES = "a mapping of token ids to numbers"
ARGUMENTS = "a mapping that JSON can express"
KINDS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: f"an integer from {-1 << 31} to {(1 << 31) - 1}",
    FieldDescriptor.CPPTYPE_STRING: "text (a str) that can be encoded as UTF-8",
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {(1 << 32) - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {(1 << 64) - 1}",
}
MISTAKEN: Mapping[int, type] = {
    FieldDescriptor.CPPTYPE_DOUBLE: bool,
    FieldDescriptor.CPPTYPE_STRING: bytes,
}
"""Types that protobuf converts silently, and that are rejected as likely mistakes."""
ADVICE: Mapping[str, str] = {
    "prompt": ": give token ids as token_ids, a conversation as messages",
    "token_ids": ": give text as prompt",
    "messages": ": give a single text as prompt",
}
FIELDS: Mapping[str, str] = {
    "leg.": "",
    "sampling.": "",
    "chat.template_kwargs": "chat_template_kwargs",
    "prompt_token_ids": "prompt",
    "token_ids.ids": "token_ids",
    "chat.messages": "messages",
    "chat.tool": "tool",
    "chat": "messages",
}
"""Beginnings of the names that the protocol gives to parameters, and what they are here."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Give one of ``prompt``, ``messages`` and ``token_ids``. ``None`` takes the default.

    timeout: seconds for the whole answer; default no limit.
    prompt: text. messages: mappings with ``role`` and ``content``, or pairs of them, rendered by
        the model's chat template. token_ids: a prompt that is already tokenized.
    chat_template_kwargs: further arguments of the template, such as ``{"enable_thinking": False}``.
    tools, tool_choice, parallel_tool_calls: functions that the answer may or must call, all as in
        OpenAI's API, as are ``tool_calls`` and ``tool_call_id`` in messages. The calls are the
        ``tool_calls`` of chunks and completions.
    output_token_ids: output tokens so far, to continue an answer; ``resume`` does it by itself.
    n: answers to make, 1 to 128, each with an ``index``; the prompt is computed once. Answer i is
        that of a request with seed + i. Each counts as a request of the tenant. Default 1.
    max_tokens: output tokens in all, those of ``output_token_ids`` included; default 16.
    sampling: a ``Sampling``; each of the following parameters replaces a field of it.
    temperature: 0 takes the likeliest token; default 1. top_k: sample from this many likeliest
        tokens. top_p: from the likeliest tokens that together have this probability. min_p: from
        tokens with at least this fraction of the likeliest one's probability. Default off.
    repetition_penalty, presence_penalty, frequency_penalty: as in vLLM; default off.
    logit_bias: numbers from -100 to 100, added to the logits of token ids before penalties.
    bad_words: texts that the answer must not have, or bad_word_ids: sequences of token ids. The
        last token of a sequence is not sampled behind the others, as in vLLM.
    seed: the same seed gives the same answer; drawn if absent, and returned with every chunk.
    stop, stop_token_ids: text and tokens that end the answer, whose text has neither.
    ignore_eos: do not end at the end-of-sequence token. min_tokens: do not end before this many
        output tokens.
    structured_output: what the text must be: a ``StructuredOutput``, or a mapping with one of
        ``json`` (a JSON schema), ``json_object``, ``regex``, ``choice`` and ``grammar``.
        response_format: the same as OpenAI's API has it.
    logprobs: report the log probability of each token and of this many likeliest tokens.
    model: the model's name; ``NotFound`` if another is served. request_id: default drawn; up to
        128 printable ASCII characters.
    explain: fill in ``missed`` in the usage of each leg: the blocks that were not found, and why.
    priority: -8 to 8; higher goes first among the waiting requests of one tenant.
    retention: what follows the answer: ``"tool_call"``, a tool runs and the next prompt comes soon,
        or ``"turn_ends"``, it comes late or never. Advice on which blocks the store keeps.
    """

    _: KW_ONLY
    timeout: float | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, object] | tuple[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: str | Mapping[str, object] | None = None
    parallel_tool_calls: bool | None = None
    output_token_ids: Sequence[int] | None = None
    n: int | None = None
    max_tokens: int | None = None
    sampling: Sampling | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: str | Sequence[str] | None = None
    bad_word_ids: Sequence[Sequence[int]] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    structured_output: StructuredOutput | Mapping[str, object] | None = None
    response_format: Mapping[str, object] | None = None
    logprobs: int | None = None
    model: str | None = None
    request_id: str | None = None
    explain: bool | None = None
    priority: int | None = None
    retention: Retention | None = None

    def message(self) -> router_pb2.GenerateRequest:
        """The protobuf message. Raises ``Rejected`` naming the parameter that cannot be sent."""
        request = router_pb2.GenerateRequest()
        self._set_input(request)
        for name in PLAIN:
            _set(request, name, getattr(self, name))
        if self.retention is not None:
            if not isinstance(self.retention, str) or self.retention not in RETENTIONS:
                raise _wrong("retention", f"one of {', '.join(RETENTIONS)}", self.retention)
            request.retention = RETENTIONS[self.retention]
        self._set_sampling(request.sampling)
        return request

    def _set_input(self, request: router_pb2.GenerateRequest) -> None:
        given = [name for name in INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise Rejected("prompt", f"give one of {', '.join(INPUTS)}, got {given or 'none'}")
        _set(request, "prompt", self.prompt)
        if self.token_ids is not None:
            request.token_ids.SetInParent()
            _set(request.token_ids, "ids", self.token_ids, "token_ids")
        if self.messages is not None:
            request.chat.SetInParent()
            for index, turn in enumerate(_elements("messages", TURN, self.messages)):
                _add_turn(request.chat, f"messages[{index}]", turn)
            set_tools(request.chat, self.tools, self.tool_choice, self.parallel_tool_calls)
        for name in OF_CHATS:
            if getattr(self, name) is not None and self.messages is None:
                raise Rejected(name, "goes with messages: leave it out")
        if self.chat_template_kwargs is not None:
            request.chat.template_kwargs = _json_object(self.chat_template_kwargs)

    def _set_sampling(self, message: types_pb2.Sampling) -> None:
        base = self.sampling
        if base is not None and not isinstance(base, Sampling):
            raise Rejected("sampling", f"must be a kvrelay.Sampling, got {base!r:.80}")
        if base is not None and base.eos_token_ids:
            raise Rejected("sampling.eos_token_ids", "comes from the model: leave it out")
        for name in SAMPLING:
            value = self._given(name)
            one = name in ONE_OR_MORE and isinstance(value, str)
            _set(message, name, [value] if one else value)
        _set_biases(message, self._given("logit_bias"))
        _set_sequences(message, self._given("bad_word_ids"))
        set_structured(message, self._given("structured_output"), self.response_format)

    def _given(self, name: str) -> object:
        """The parameter, or the field of ``sampling`` that it does not replace."""
        value: object = getattr(self, name)
        return getattr(self.sampling, name) if value is None and self.sampling else value


def seconds_of(timeout: float | None) -> float | None:
    """The timeout for gRPC, ``None`` for no limit. Raises ``Rejected`` if it is not a number."""
    if timeout is None:
        return None
    if not isinstance(timeout, Real) or isinstance(timeout, bool) or math.isnan(timeout):
        raise Rejected("timeout", f"must be a number of seconds, got {timeout!r:.80}")
    return None if timeout > LONGEST_SECONDS else timeout


def parameter_error(error: KvrelayError) -> KvrelayError:
    """The error of a router, with the name of the parameter in place of the protocol's field."""
    if not isinstance(error, Rejected):
        return error
    name = error.field
    for field, parameter in FIELDS.items():
        if name.startswith(field):
            name = parameter + name.removeprefix(field)
            if parameter:
                break
    return Rejected(name, error.message)


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


def _add_turn(chat: router_pb2.Chat, parameter: str, turn: object) -> None:
    match turn:
        case {"role": role, "content": content} | (role, content) if None not in (role, content):
            message = chat.messages.add()
        case {"role": role, "tool_calls": [_, *_]} if role is not None:
            content, message = None, chat.messages.add()
        case _:
            raise _wrong(parameter, TURN, turn)
    _set(message, "role", role, f"{parameter}.role")
    _set(message, "content", content, f"{parameter}.content")
    if isinstance(turn, Mapping):
        _set(message, "tool_call_id", turn.get("tool_call_id"), f"{parameter}.tool_call_id")
        for name in ("reasoning_content", "reasoning"):
            _set(message, "reasoning", turn.get(name), f"{parameter}.{name}")
        if (calls := turn.get("tool_calls")) is not None:
            set_calls(message, calls, f"{parameter}.tool_calls")


def _set_biases(message: types_pb2.Sampling, biases: object) -> None:
    if biases is None:
        return
    if not isinstance(biases, Mapping):
        raise _wrong("logit_bias", BIASES, biases)
    for token, bias in biases.items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token  # as in JSON
        if isinstance(bias, bool):
            raise _wrong(f"logit_bias[{token}]", "a number", bias)
        try:
            message.logit_bias[token] = bias
        except (TypeError, ValueError, OverflowError):
            known = isinstance(token, int) and 0 <= token < 1 << 32
            kind = "a number" if known else f"for {KINDS[FieldDescriptor.CPPTYPE_UINT32]}"
            raise _wrong(f"logit_bias[{token!r:.80}]", kind, bias) from None


def _set_sequences(message: types_pb2.Sampling, sequences: object) -> None:
    if sequences is None:
        return
    for index, ids in enumerate(_elements("bad_word_ids", "a list of token ids", sequences)):
        sequence = message.bad_word_ids.add()
        sequence.SetInParent()
        _set(sequence, "ids", ids, f"bad_word_ids[{index}]")


def _json_object(value: object) -> str:
    """The text of a JSON object."""
    if not isinstance(value, Mapping):
        raise _wrong("chat_template_kwargs", ARGUMENTS, value)
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejected("chat_template_kwargs", f"must be {ARGUMENTS}: {error}") from None


def _set(message: RequestPart, name: str, value: object, parameter: str = "") -> None:
    """Set a field, or fill a list, unless the value is ``None``. Errors name the parameter."""
    if value is None:
        return
    field, parameter = message.DESCRIPTOR.fields_by_name[name], parameter or name
    kind = field.cpp_type
    if field.is_repeated:
        append = getattr(message, name).append
        for index, element in enumerate(_elements(parameter, KINDS[kind], value)):
            if not _stored(kind, element, append):
                raise _wrong(f"{parameter}[{index}]", KINDS[kind], element)
    elif not _stored(kind, value, lambda one: setattr(message, name, one)):
        raise _wrong(parameter, KINDS[kind], value)


def _stored(kind: int, value: object, store: Callable[[object], None]) -> bool:
    """Whether the message took the value."""
    if isinstance(value, MISTAKEN.get(kind, ())):
        return False
    try:
        store(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _elements(parameter: str, kind: str, values: object) -> Iterable[object]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise _wrong(parameter, f"a list, each {kind}", values)
    return values


def _wrong(parameter: str, wanted: str, value: object) -> Rejected:
    advice = ADVICE.get(parameter, "")
    return Rejected(parameter, f"must be {wanted}, got {value!r:.80}{advice}")
