"""From the body of a request to the message of the router, field by field.

What the message has under another name, or cannot say, is decided here and nowhere else. The
values are checked where gRPC's are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import RETENTIONS, structured_message
from kvrelay.sampling import MAX_SAMPLES, MAX_TOP_LOGPROBS, SEEDS, check_count
from kvrelay.structured import FIELD as STRUCTURED
from kvrelay.structured import StructuredOutput, of_mapping, of_response_format
from kvrelay.v1 import router_pb2
from router.generate.request import samples_of
from router.http.conversation import TOOLS, read_messages
from router.http.fields import (
    INT32,
    UINT32,
    UINT64,
    Fields,
    checked_ids,
    checked_text,
    shown,
    wrong,
)
from router.queue.fair import HIGHEST, LOWEST

log = logging.getLogger("kvrelay.router")

FORMAT_NAMES = {"": "response_format", ".json_schema": "response_format.json_schema.schema"}
OUTPUT_NAMES = {"": "structured_outputs", ".json_schema": "structured_outputs.json"}
"""Of the fields of a constraint in a body, by how it was asked for."""

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SILENT = (
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields of OpenAI that change no answer here."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer and that this server does not have. Their values that change
nothing are accepted, others are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the client wants to see the answer to ``prompts``, ``samples`` of each.

    ``continuous``: usage with every event.
    """

    prompts: int
    samples: int
    stream: bool = False
    usage: bool = False
    continuous: bool = False
    token_ids: bool = False
    logprobs: bool = False
    echo: bool = False
    reasoning: bool = True
    by_format: bool = False  # what the text must be was asked for as OpenAI's response_format
    limit_name: str = "max_tokens"  # the field that bounds the output

    @property
    def choices(self) -> int:
        """Answers in all; sample i of prompt p has the index ``p * samples + i``."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a message for each prompt, and the form of the answer.

    ``fills``: without ``max_tokens``, as many as fit. ``cache_salt``: only requests with the same
    one share cached blocks.
    """

    messages: Sequence[router_pb2.GenerateRequest]
    form: AnswerForm
    fills: bool = False
    cache_salt: str = ""

    def seed(self, seed: int) -> None:
        """Give each prompt a seed, so that no two choices have the same one."""
        for index, message in enumerate(self.messages):
            message.sampling.seed = (seed + index * self.form.samples) % SEEDS


def read_ask(values: Mapping[str, object], chat: bool, request_id: str, strict: bool) -> Ask:
    """The request of a body. Raises ``Rejected`` naming the field that is wrong."""
    fields = Fields(values)
    message = router_pb2.GenerateRequest(request_id=request_id)
    message.model = fields.text("model") or ""
    # vLLM: lower goes first, so the bounds change places too.
    message.priority = -(fields.whole("priority", -HIGHEST, -LOWEST) or 0)
    prompts = read_input(fields, message, chat)
    _read_sampling(fields, message, chat)
    _read_biases(fields, message)
    if (samples := fields.whole("n")) is not None:
        message.n = samples
    if (retention := fields.text("retention")) is not None:
        if retention not in RETENTIONS:
            raise wrong("retention", f"one of {', '.join(RETENTIONS)}", retention)
        message.retention = RETENTIONS[retention]
    message.output_token_ids.extend(fields.ids("output_token_ids") or ())
    limit, fills = _read_max_tokens(fields, message, chat)
    stream, options = fields.flag("stream"), fields.table("stream_options")
    if options is not None and not stream:
        raise Rejected("stream_options", "is for streams: set stream to true")
    usage = options is not None and options.flag("include_usage")
    continuous = options is not None and options.flag("continuous_usage_stats")
    if options is not None:
        options.raw("include_obfuscation")  # OpenAI's: no event here has padding
    form = AnswerForm(
        prompts=len(prompts),
        samples=samples_of(message),
        stream=stream,
        usage=usage,
        continuous=usage and continuous,
        token_ids=fields.flag("return_token_ids"),
        logprobs=message.sampling.HasField("logprobs"),
        echo=not chat and fields.flag("echo"),
        reasoning=fields.flag("include_reasoning", True),
        by_format=fields.raw("response_format") is not None,
        limit_name=limit,
    )
    if form.echo and form.logprobs:
        raise Rejected("logprobs", "log probabilities of a prompt are not computed: leave out echo")
    if form.prompts > 1 and form.samples > 0 and form.choices > MAX_SAMPLES:
        raise Rejected(
            "prompt",
            f"{form.prompts} prompts with n {form.samples} are {form.choices} answers: at most"
            f" {MAX_SAMPLES}",
        )
    if chat and fields.flag("echo"):
        raise Rejected("echo", "is for completions: leave it out")
    salt = fields.text("cache_salt")
    if salt == "":
        raise Rejected("cache_salt", "is empty, which would separate nothing: leave it out")
    check_rest(fields, strict)
    return Ask(messages=_each(message, prompts), form=form, fills=fills, cache_salt=salt or "")


def _each(
    message: router_pb2.GenerateRequest, prompts: Sequence[object]
) -> Sequence[router_pb2.GenerateRequest]:
    """The message, or one for each of several prompts."""
    if len(prompts) == 1:
        return (message,)
    made = []
    for index, prompt in enumerate(prompts):
        one = router_pb2.GenerateRequest()
        one.CopyFrom(message)
        _set_prompt(one, f"prompt[{index}]", prompt)
        made.append(one)
    return made


def read_input(fields: Fields, message: router_pb2.GenerateRequest, chat: bool) -> Sequence[object]:
    """Set the prompt or the conversation of a message. Returns all prompts if there are several."""
    prompts: Sequence[object] = (None,)
    if chat:
        read_messages(fields, message.chat)
    else:
        prompts = _read_prompts(fields, message)
    special = fields.flag("add_special_tokens", not chat)
    if special == chat:
        raise Rejected("add_special_tokens", f"must be {shown(not chat)} here, or left out")
    return prompts


def _read_prompts(fields: Fields, message: router_pb2.GenerateRequest) -> Sequence[object]:
    """The prompts; a single one is set in the message."""
    for name, neutral in TOOLS.items():
        if (value := fields.raw(name)) is not None and value not in neutral:
            raise Rejected(name, "is for chats: send messages, or leave it out")
    given = fields.raw("prompt")
    match given:
        case None:
            raise Rejected("prompt", "missing: give text, or a list of token ids")
        case [str() | list(), _, *_]:
            if len(given) > MAX_SAMPLES:
                raise Rejected("prompt", f"{len(given)} prompts: at most {MAX_SAMPLES}")
            return given
        case [str() | list() as one]:
            _set_prompt(message, "prompt", one)
        case _:
            _set_prompt(message, "prompt", given)
    return (given,)


def _set_prompt(message: router_pb2.GenerateRequest, where: str, prompt: object) -> None:
    match prompt:
        case str():
            message.prompt = checked_text(where, prompt)
        case list():
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(checked_ids(where, prompt))
        case _:
            raise wrong(where, "text, or a list of token ids", prompt)


def _read_sampling(fields: Fields, message: router_pb2.GenerateRequest, chat: bool) -> None:
    sampling = message.sampling
    for name in NUMBERS:
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (top_k := fields.whole("top_k", -1)) is not None:
        sampling.top_k = max(top_k, 0)  # vLLM: both -1 and 0 are off
    if (seed := fields.whole("seed", -1, UINT64)) is not None and seed >= 0:
        sampling.seed = seed  # vLLM: -1 is none
    if (least := fields.whole("min_tokens", 0)) is not None:
        sampling.min_tokens = least
    if fields.raw("ignore_eos") is not None:
        sampling.ignore_eos = fields.flag("ignore_eos")
    check_count("stop_token_ids", len(fields.items("stop_token_ids", "token ids") or ()))
    sampling.stop_token_ids.extend(fields.ids("stop_token_ids") or ())
    sampling.stop.extend(_stops(fields.raw("stop")))
    if (wanted := _structured(fields)) is not None:
        try:
            wanted.check()
            sampling.structured_output.CopyFrom(structured_message(wanted))
        except Rejected as error:
            by_format = fields.raw("response_format") is not None
            raise Rejected(constraint_name(error.field, by_format), error.message) from None
    if (count := _logprobs(fields, chat)) is not None:
        sampling.logprobs = count


def _read_biases(fields: Fields, message: router_pb2.GenerateRequest) -> None:
    biases, words = fields.table("logit_bias"), fields.items("bad_words", "strings")
    biases, words = biases or Fields({}), words or ()
    check_count("logit_bias", len(biases.names))
    check_count("bad_words", len(words))
    for name in biases.names:
        where = f"logit_bias.{name:.20}"
        token = int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else -1
        if not 0 <= token <= UINT32:
            raise Rejected(where, "each name must be a token id")
        if (bias := biases.number(name)) is None:
            raise wrong(where, "a number", None)
        message.sampling.logit_bias[token] = bias
    for index, word in enumerate(words):
        message.sampling.bad_words.append(checked_text(f"bad_words[{index}]", word))


def _stops(value: object) -> Sequence[str]:
    match value:
        case None:
            return ()
        case str():
            return (checked_text("stop", value),)
        case list():
            check_count("stop", len(value))
            return [checked_text(f"stop[{index}]", one) for index, one in enumerate(value)]
    raise wrong("stop", "a string, or a list of strings", value)


def _structured(fields: Fields) -> StructuredOutput | None:
    """What OpenAI's ``response_format`` or vLLM's ``structured_outputs`` asks for."""
    form = fields.raw("response_format")
    wanted = None if form is None else of_response_format(form)
    if isinstance(form, dict):
        _read_format(fields.part("response_format", form))
    given = fields.raw("structured_outputs")
    if given is None:
        return wanted
    if wanted is not None:
        raise Rejected("structured_outputs", "response_format is given too: leave one out")
    if not isinstance(given, Mapping):
        raise wrong("structured_outputs", "an object", given)
    return of_mapping(given, "structured_outputs")


def _read_format(form: Fields) -> None:
    """Check what beside the schema is in OpenAI's ``response_format``; it changes no answer."""
    form.raw("type")
    if (about := form.table("json_schema")) is not None:
        about.raw("schema")
        about.text("name")
        about.text("description")
        about.flag("strict")


def constraint_name(field: str, by_format: bool) -> str:
    """The name in a body of a field of ``sampling.structured_output``."""
    names = FORMAT_NAMES if by_format else OUTPUT_NAMES
    kind = field.removeprefix(STRUCTURED)
    return names.get(kind, names[""] + kind)


def _logprobs(fields: Fields, chat: bool) -> int | None:
    """How many of the likeliest tokens to report; ``None`` for no log probabilities."""
    if not chat:
        return fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wanted:
        raise Rejected("top_logprobs", "needs logprobs: set it to true")
    return (top or 0) if wanted else None


def _read_max_tokens(
    fields: Fields, message: router_pb2.GenerateRequest, chat: bool
) -> tuple[str, bool]:
    """Set ``max_tokens``. Returns the name of the field that was given, and whether none was and it
    is to become as many as fit, as chats have it.
    """
    names = ("max_completion_tokens", "max_tokens")
    given = {name: fields.whole(name, -INT32, INT32) for name in names}
    for name, value in given.items():
        if value is not None:
            message.max_tokens = value
            return name, False
    if chat:
        message.max_tokens = INT32  # until the length of the prompt is known
    return "max_tokens", chat


def check_rest(fields: Fields, strict: bool) -> None:
    """Refuse fields that would change the answer; log or refuse those that nobody knows."""
    for name, neutral in NEUTRAL.items():
        value = fields.raw(name)
        if value is not None and not any(_same(value, one) for one in neutral):
            raise Rejected(name, f"{shown(value)} is not served here: leave it out")
    for name in SILENT:
        fields.raw(name)
    if unknown := fields.unknown:
        names = ", ".join(shown(name) for name in unknown[:8])
        if strict:
            raise Rejected(unknown[0], "no such field, and this server has --strict-fields")
        log.info("ignored unknown fields of a request: %s", names)


def _same(value: object, other: object) -> bool:
    """Equal, and not a number that stands for a truth value."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
