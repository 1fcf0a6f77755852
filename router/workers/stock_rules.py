"""A leg as an unmodified ``vllm serve`` takes it, and what such a server cannot do."""

from __future__ import annotations

from kvrelay.errors import Unservable
from kvrelay.rpc.protocol import sampling_of
from kvrelay.v1 import types_pb2

SEED_BITS = (1 << 63) - 1  # vLLM keeps seeds as signed numbers
AS_THEY_ARE = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "ignore_eos", "logprobs", "stop", "stop_token_ids"),
)


def request_of(leg: types_pb2.Leg, seeded: bool) -> dict[str, object]:
    """The body for ``/inference/v1/generate``. ``Unservable`` with every reason why not.

    ``seeded``: the server draws by (seed, position), as model runner V2 does.
    """
    given = sampling_of(leg.sampling)
    everywhere = {"bad words": given.bad_word_ids, "structured output": given.structured_output}
    resumed = {
        "sampling without --stock-seeds": given.temperature > 0 and not seeded,
        "presence_penalty": given.presence_penalty,
        "frequency_penalty": given.frequency_penalty,
        "stop strings": given.stop,
    }
    if reasons := [name for name, value in everywhere.items() if value]:
        raise Unservable(f"unmodified vLLM does not serve {', '.join(reasons)}")
    if leg.output_token_ids and (reasons := [name for name, value in resumed.items() if value]):
        raise Unservable(
            f"unmodified vLLM cannot continue an answer with {', '.join(reasons)}: it takes the"
            " tokens so far for a part of the prompt; start it again"
        )
    params: dict[str, object] = {name: getattr(given, name) for name in AS_THEY_ARE}
    params["max_tokens"] = leg.max_tokens - len(leg.output_token_ids)
    params["min_tokens"] = max(given.min_tokens - len(leg.output_token_ids), 0)
    params["detokenize"] = bool(given.stop)
    params["logit_bias"] = {str(token): bias for token, bias in given.logit_bias.items()} or None
    params["seed"] = given.seed & SEED_BITS if seeded and given.seed is not None else None
    return {
        "request_id": f"{leg.request_id}-{leg.generation_id:x}-{leg.leg_index}",
        "token_ids": [*leg.prompt_token_ids, *leg.output_token_ids],
        "sampling_params": params,
        "cache_salt": leg.tenant_salt.hex() or None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
