"""What a request in vLLM carries for kvrelay's sampler, and the check of it at vLLM's door."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol, cast

from kvrelay.errors import KvrelayError, Rejected
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput

KEY = "kvrelay"
OWN = ("prompt_len", "id")
FIELDS = frozenset(field.name for field in fields(Sampling))
LARGEST_VOCABULARY = 1 << 31  # at the door: ``within`` leaves out ids that the model has not
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
LARGEST = 1e300  # numbers; a larger one in JSON is an integer that is no float
ENDS = ("stop_token_ids", "eos_token_ids", "ignore_eos")
OF_SERVICES = ("stop", "bad_words")
"""Fields that kvrelay's services turn into others. They name their requests; HTTP does not."""


class VllmParams(Protocol):
    """``vllm.SamplingParams``, as far as it is read."""

    @property
    def extra_args(self) -> Mapping[str, object] | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How a request's tokens are chosen; its output begins at ``prompt_len``.

    Without ``prompt_len`` all tokens that vLLM was given are the prompt. ``id`` finds the grammar
    of structured output, empty without one.
    """

    sampling: Sampling
    prompt_len: int | None
    id: str = ""


def rules_of(params: VllmParams) -> Rules | None:
    """The rules of a request, ``None`` if vLLM's own sampler chooses its tokens.

    The fields are an object or its JSON text: ``vllm_xargs`` of vLLM's HTTP API carries no
    objects. Log probabilities are vLLM's: the sampler is not asked for them. Raises
    ``ValueError``.
    """
    given = (params.extra_args or {}).get(KEY)
    if given is None:
        return None
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, Mapping):
        raise ValueError(f'extra_args["{KEY}"] must be an object or its JSON, got {given!r:.80}')
    if unknown := sorted(set(given) - FIELDS - set(OWN)):
        raise ValueError(f'extra_args["{KEY}"]["{unknown[0]}"] is unknown')
    prompt_len = given.get("prompt_len")
    if prompt_len is not None and (not isinstance(prompt_len, int) or prompt_len < 1):
        raise ValueError(f'extra_args["{KEY}"]["prompt_len"] must be at least 1: {prompt_len!r}')
    name = given.get("id", "")
    if not isinstance(name, str):
        raise ValueError(f'extra_args["{KEY}"]["id"] must be a text, got {name!r}')
    if given.get("logprobs") is not None and not name:
        raise ValueError(f'extra_args["{KEY}"]["logprobs"] is not served: use vLLM\'s own')
    values = {name: _value(name, given[name]) for name in FIELDS & set(given)}
    sampling = Sampling(**cast("dict[str, float]", values))  # type: ignore[arg-type]
    return Rules(replace(sampling, logprobs=None), prompt_len, name)


def _parsed(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _value(name: str, value: object) -> object:
    """A field as ``Sampling`` has it; JSON knows no tuples and no numbers as keys."""
    if name == "structured_output" and isinstance(value, Mapping):
        parts = {key: _frozen(one) for key, one in value.items()}
        return StructuredOutput(**cast("dict[str, str]", parts))  # type: ignore[arg-type]
    if name == "logit_bias" and isinstance(value, Mapping):
        try:
            return {int(token): float(bias) for token, bias in value.items()}
        except (TypeError, ValueError, OverflowError):
            raise Rejected(name, "must have token ids and numbers") from None
    return _frozen(value)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def within(rules: Rules, vocabulary: int) -> Rules:
    """The rules without ids that the model has not: they would stand for those of other rows."""
    sampling = rules.sampling
    known = range(vocabulary)
    kept = replace(
        sampling,
        logit_bias={token: bias for token, bias in sampling.logit_bias.items() if token in known},
        stop_token_ids=tuple(token for token in sampling.stop_token_ids if token in known),
        eos_token_ids=tuple(token for token in sampling.eos_token_ids if token in known),
        bad_word_ids=tuple(
            word for word in sampling.bad_word_ids if all(token in known for token in word)
        ),
    )
    return replace(rules, sampling=kept)


def _wrong_types(sampling: Sampling) -> Iterator[str]:
    """Names of fields that are not what ``Sampling`` says: JSON may give anything."""
    for name in ("temperature", "top_p", "min_p", *_PENALTIES):
        value = getattr(sampling, name)
        if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
            yield name
    for name in ("top_k", "min_tokens"):
        if type(getattr(sampling, name)) is not int:
            yield name
    if sampling.seed is not None and type(sampling.seed) is not int:
        yield "seed"
    if type(sampling.ignore_eos) is not bool:
        yield "ignore_eos"
    for name in ("stop", "bad_words"):
        if not _all(getattr(sampling, name), str):
            yield name
    for name in ("stop_token_ids", "eos_token_ids"):
        if not _are_ids(getattr(sampling, name)):
            yield name
    words = sampling.bad_word_ids
    if not (isinstance(words, tuple) and all(map(_are_ids, words))):
        yield "bad_word_ids"
    if not isinstance(sampling.logit_bias, dict):
        yield "logit_bias"


def _all(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(type(value) is kind for value in values)


def _are_ids(values: object) -> bool:
    return _all(values, int) and all(value >= 0 for value in cast("tuple[int, ...]", values))


def check_rules(params: VllmParams) -> None:
    """Raise ``ValueError`` for fields that are out of range, or at odds with vLLM's own."""
    try:
        rules = rules_of(params)
        if rules is not None:
            if name := next(_wrong_types(rules.sampling), ""):
                raise Rejected(name, "is of another type, or too large")
            _check_served(rules)
            rules.sampling.check(LARGEST_VOCABULARY)
    except (KvrelayError, TypeError, OverflowError) as error:
        raise ValueError(f'extra_args["{KEY}"]: {error}') from error
    if rules is None:
        return
    if params.temperature != 0:
        raise ValueError(
            f"vLLM's temperature must be 0, not {params.temperature}: kvrelay's own is in"
            f' extra_args["{KEY}"]'
        )
    if rules.sampling.temperature > 0 and rules.sampling.seed is None:
        raise ValueError(f'extra_args["{KEY}"] needs a "seed" with a temperature above 0')
    if params.seed is not None:
        raise ValueError(f"vLLM's seed must be unset: kvrelay's own is in extra_args[{KEY!r}]")


def _check_served(rules: Rules) -> None:
    """Refuse fields that neither kvrelay's sampler nor vLLM would apply."""
    if rules.sampling.structured_output is not None:
        raise Rejected("structured_output", "is for kvrelay's services: use vLLM's own")
    for name in OF_SERVICES:
        if getattr(rules.sampling, name) and not rules.id:
            raise Rejected(name, "is for kvrelay's services: use vLLM's own")
    for name in ENDS:
        if getattr(rules.sampling, name) and not (rules.id or rules.sampling.min_tokens):
            raise Rejected(name, "only tells what min_tokens holds back: use vLLM's own to stop")
