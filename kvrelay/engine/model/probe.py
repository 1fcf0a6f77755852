"""Observes a loaded model, and checks that paging does not change its logits.

``observe_model`` records every call of the attention in one forward pass: from that come the
layers, heads and widths of the pool, and refusals of what the plug-in does not implement.
``compare_logits`` computes two short sequences in chunks over a scattered pool and compares them
with the model's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvrelay.engine.attention.backend import AttentionBackend
from kvrelay.engine.attention.batch import pack
from kvrelay.engine.attention.choice import choose_attention, least_block_size
from kvrelay.engine.attention.pool import KVPool, PoolShape
from kvrelay.engine.core.updates import Work
from kvrelay.engine.model.forward import CausalModel, TransformersModel
from kvrelay.engine.model.fused_decoder import forward_for
from kvrelay.engine.model.pretrained import FOREIGN
from kvrelay.errors import Unservable
from kvrelay.model_folder import joined
from kvrelay.sampling import Sampling

_OBSERVED = "kvrelay_observed"
_BIASES = {
    "softcap": "soft-capped attention logits, as in Gemma 2",
    "s_aux": "attention sinks, as in gpt-oss",
    "position_bias": "position biases, as in T5",
    "alibi": "ALiBi position biases",
}
# The largest allowed difference of logits, as a share of their largest magnitude: rounding grows
# with depth, while a wrong slot, mask or bias changes logits by the order of their size.
_TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """The shape of every layer's attention, and the numbers of layers and logits."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int
    heads: int
    kv_heads: int
    head_dim: int


class _Observer:
    """Takes the place of a step: records each call, and once each reason against its attention."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.calls: list[_Call] = []
        self.reasons: dict[str, None] = {}

    def note(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, object],
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unservable("attention modules without a layer number")
        self.reasons |= dict.fromkeys(self._reasons(module, mask, options))
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            widths = f"keys of width {key.shape[-1]} and values of width {value.shape[-1]}"
            reason = f"{widths}, as in multi-head latent attention (MLA): not implemented"
            self.reasons[reason] = None
        self.calls.append(_Call(layer, query.shape[1], key.shape[1], key.shape[3]))

    def finish(self, expected: int | None) -> None:
        """Add the reasons that all calls together show; ``expected`` is the number of layers."""
        layers = [call.layer for call in self.calls]
        if not layers or len(layers) != (expected or len(layers)):
            self.reasons[f"{len(layers)} of {expected} layers call the attention interface"] = None
        elif layers != list(range(len(layers))):
            self.reasons["layers do not each have a KV of their own, in order"] = None
        elif len({replace(call, layer=0) for call in self.calls}) > 1:
            self.reasons["layers that differ in the number or width of their heads"] = None

    def _reasons(
        self, module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, object]
    ) -> Iterator[str]:
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            yield "attention that is not causal: only decoders are served"
        for name, words in _BIASES.items():
            if options.get(name) is not None:
                yield f"{words}: not implemented"
        window = options.get("sliding_window")
        if isinstance(window, int) and window < self.max_len:
            yield f"a sliding window of {window}: not implemented"
        if mask is not None:
            yield "attention with a mask of the model's own: not implemented"


def _observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kvrelay_step: _Observer | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    if kvrelay_step is None:
        raise Unservable("the model does not pass its keyword arguments on to the attention")
    kvrelay_step.note(module, query, key, value, attention_mask, options)
    batch, heads, count, _ = query.shape
    return query.new_zeros(batch, count, heads, value.shape[-1]), None


AttentionInterface.register(_OBSERVED, _observed_attention)


def observe_model(forward: TransformersModel, device: torch.device, max_len: int) -> ObservedModel:
    """Run three tokens; all layers must have the same shape and be numbered in order.

    Raises ``Unservable`` if a layer has no attention, or shares the KV of another.
    """
    observer = _Observer(max_len)
    vocab = _run(forward, device, observer)
    if observer.reasons:
        raise Unservable(joined([*observer.reasons]))
    last = observer.calls[-1]
    return ObservedModel(len(observer.calls), last.heads, last.kv_heads, last.head_dim, vocab)


def observed_reasons(skeleton: PreTrainedModel, max_len: int) -> tuple[str, ...]:
    """The reasons that ``observe_model`` would find, from modules on the meta device.

    A forward that needs weights ends early: then the reasons are those observed before.
    """
    observer = _Observer(max_len)
    torch.nn.Module.to(skeleton, torch.bfloat16)  # experts' products take nothing else there
    skeleton.train(False)
    try:
        with torch.inference_mode():
            _run(TransformersModel(skeleton), torch.device("meta"), observer)
    except Unservable as error:
        return (*observer.reasons, str(error))
    except FOREIGN:
        pass
    return tuple(observer.reasons)


def _run(forward: TransformersModel, device: torch.device, observer: _Observer) -> int:
    """Run three tokens; returns the number of logits."""
    forward.set_attention(_OBSERVED)
    tokens = torch.tensor([[0, 1, 2]], device=device)
    logits = forward.logits(tokens, tokens.clone(), observer, tokens[0, -1:])
    observer.finish(getattr(forward.model.config, "num_hidden_layers", None))
    return logits.shape[-1]


def reference_logits(forward: TransformersModel, device: torch.device, vocab: int) -> torch.Tensor:
    """Logits [2, vocab] after two short sequences, as plain `transformers` computes them."""
    forward.set_attention("eager")
    rows = [torch.tensor(tokens, device=device) for tokens in _sequences(vocab)]
    return torch.stack([forward.plain_logits(row) for row in rows])


def compare_logits(
    forward: CausalModel,
    shape: PoolShape,
    device: torch.device,
    own: torch.Tensor,
    attention_backend: str,
) -> float:
    """The largest difference between paged and ``own`` logits, relative to the largest of these.

    Raises ``Unservable`` if it is more than rounding.
    """
    size = max(2, least_block_size(attention_backend))
    pool = KVPool(replace(shape, num_blocks=7, block_size=size), device)
    backend = choose_attention(attention_backend, pool).backend
    paged = _paged_logits(forward_for(forward, backend), backend, pool, _sequences(own.shape[1]))
    difference = (own.float() - paged.float()).abs().max().item()
    relative = difference / max(own.float().abs().max().item(), 1e-6)
    if not relative <= _TOLERANCE[shape.dtype]:  # a NaN fails this too
        raise Unservable(
            f"paged attention changes its logits by {difference:.3g} ({relative:.1%} of their size)"
        )
    return relative


def _sequences(vocab: int) -> list[list[int]]:
    lengths = {1: 7, 5: 5}
    return [[(7 * i * i + 3 * i + s) % vocab for i in range(n)] for s, n in lengths.items()]


def _paged_logits(
    forward: CausalModel, backend: AttentionBackend, pool: KVPool, sequences: list[list[int]]
) -> torch.Tensor:
    """Logits after both sequences, computed in two mixed steps from scattered blocks."""
    tables = ([5, 0, 6, 2], [4, 1, 3])
    logits = torch.empty(0)
    for spans in (((0, 3), (0, 4)), ((3, 4), (4, 1))):
        works = [
            Work(tokens, start, count, table, len(tokens), Sampling())
            for tokens, table, (start, count) in zip(sequences, tables, spans, strict=True)
        ]
        batch = pack(works, pool.shape.block_size)
        step = backend.step(batch)
        inputs = step.inputs
        logits = forward.logits(inputs.tokens, inputs.positions, step, inputs.rows)
        logits = logits[torch.tensor(batch.samples, device=pool.device).argsort()]
    return logits
