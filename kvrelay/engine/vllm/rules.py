"""What a request in vLLM carries for kvrelay's sampler, and the check of it at vLLM's door."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol, cast

from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput

KEY = "kvrelay"
OWN = ("prompt_len", "id")
FIELDS = frozenset(field.name for field in fields(Sampling))
LARGEST_VOCABULARY = 1 << 31  # vLLM checks token ids against the model's own


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
        raise ValueError(f'extra_args["{KEY}"] must be an object or its JSON, got {given!r}')
    if unknown := sorted(set(given) - FIELDS - set(OWN)):
        raise ValueError(f'extra_args["{KEY}"]["{unknown[0]}"] is unknown')
    prompt_len = given.get("prompt_len")
    if prompt_len is not None and (not isinstance(prompt_len, int) or prompt_len < 1):
        raise ValueError(f'extra_args["{KEY}"]["prompt_len"] must be at least 1: {prompt_len!r}')
    name = given.get("id", "")
    if not isinstance(name, str):
        raise ValueError(f'extra_args["{KEY}"]["id"] must be a text, got {name!r}')
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
        return {int(token): float(bias) for token, bias in value.items()}
    return _frozen(value)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def check_rules(params: VllmParams) -> None:
    """Raise ``ValueError`` for fields that are out of range, or at odds with vLLM's own."""
    try:
        rules = rules_of(params)
        if rules is not None:
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
