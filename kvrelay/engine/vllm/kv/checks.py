"""What of vLLM the adapter can carry: every reason why not, at start, before anything is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.errors import Unservable

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV cache group: the kind of attention, its shape for one rank, its quantisation."""

    kind: str
    layers: int
    block_size: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: str
    sliding_window: int | None = None
    chunked: bool = False
    quantised: bool = False
    packed: bool = False
    non_causal: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of a vLLM engine decides whether the adapter can carry its KV."""

    role: str
    load_failure_policy: str
    groups: tuple[GroupFacts, ...]
    pipeline_ranks: int = 1
    context_ranks: int = 1
    prefill_context_ranks: int = 1
    speculative: bool = False
    version_refusal: str = ""


def check_engine(facts: EngineFacts) -> None:
    """Raise ``Unservable`` with every reason why this engine's KV cannot be carried."""
    reasons = [*_engine(facts), *_groups(facts.groups)]
    if reasons:
        numbered = "; ".join(f"({number}) {one}" for number, one in enumerate(reasons, 1))
        raise Unservable(f"kvrelay cannot carry the KV of this vLLM: {numbered}")


def _engine(facts: EngineFacts) -> Iterator[str]:
    if facts.version_refusal:
        yield facts.version_refusal
    if facts.role != "kv_both":
        yield f'kv_role is {facts.role!r}: set "kv_both"'
    if facts.load_failure_policy != "recompute":
        yield (
            f"kv_load_failure_policy is {facts.load_failure_policy!r}: a failed load would end the"
            ' request; set "recompute"'
        )
    if facts.pipeline_ranks > 1:
        yield f"{facts.pipeline_ranks} pipeline ranks: each holds some layers of a block"
    if facts.context_ranks > 1 or facts.prefill_context_ranks > 1:
        yield "context parallelism: each rank holds some positions of a block"
    if facts.speculative:
        yield "speculative decoding: its rejected positions would be counted, and its KV saved"


def _groups(groups: Sequence[GroupFacts]) -> Iterator[str]:
    if len(groups) != 1:
        kinds = ", ".join(group.kind for group in groups) or "none"
        yield f"{len(groups)} KV cache groups ({kinds}): one of full attention is carried"
    for group in groups:
        yield from _group(group)


def _group(group: GroupFacts) -> Iterator[str]:
    if group.kind != "FullAttentionSpec":
        yield f"{group.kind}: only full attention is carried"
        return
    if group.sliding_window is not None:
        yield f"a sliding window of {group.sliding_window} positions"
    if group.chunked:
        yield "chunked local attention"
    if group.quantised or group.dtype not in DTYPES:
        yield f"a quantised KV cache ({group.dtype}): use one of {', '.join(DTYPES)}"
    if group.value_dim != group.head_dim:
        yield f"K of {group.head_dim} and V of {group.value_dim} numbers a head"
    if group.non_causal:
        yield "attention that is not causal: the KV of a block depends on what follows it"
    if group.packed:
        yield "an attention backend that packs several heads or states into one"
