"""The model before training: two layers whose attention already performs the recall.

Layer 1 gathers, at every token, the nearest adjective and noun (and the question word and the
previous token); layer 2 finds the value with the same two and copies it. Random starts never leave
chance in the time we have. Method: induction heads, Olsson et al., arXiv:2209.11895.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.recall.layout import AT, CODE, FOLLOWS, HIDDEN, OTHER, VALUES, coordinate, sorts_of
from benchmarks.recall.tokenizer import token
from kvrelay.recall.prompt import BEGIN, END, PAD

HEAD: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
THETA: Final = 1e10
"""Large, so that 21 of 32 frequencies turn by less than a radian over 2,000 tokens: these match."""

NEAR: Final = (3, 4, 5, 6, 8)
"""Frequencies whose cosines together fall off fastest over distances of one sentence."""
STEP: Final = (0, 1, 2)
"""Frequencies fast enough to tell one token from the next."""
QUESTION: Final = (2, 7, 9)
SLOW: Final = 11
SHARP: Final = 14.0
MATCH: Final = 10.0
COPY: Final = 3.0


def config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The shape: 2 layers, 4 heads on 2 KV heads, untied, float32."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
        bos_token_id=token(tokenizer, BEGIN),
        eos_token_id=token(tokenizer, END),
        pad_token_id=token(tokenizer, PAD),
        dtype="float32",
    )


def construct(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A model that finds the fact asked for, though it does not yet know the language."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(tokenizer))
    sorts = sorts_of(tokenizer)
    codes = nn.functional.normalize(torch.randn(len(tokenizer), CODE), dim=1)
    first, second = model.model.layers
    with torch.no_grad():
        _embed(model.model.embed_tokens.weight, sorts, codes)
        _gather(first.self_attn)
        _match(second.self_attn)
        _read(model.lm_head.weight, sorts, codes)
        for layer in (first, second):
            layer.mlp.down_proj.weight.mul_(0.1)
    return model


def _embed(weight: Tensor, sorts: dict[str, list[int]], codes: Tensor) -> None:
    weight.zero_()
    weight[:, AT.one] = 1
    weight[:, OTHER] = 1
    weight[:, AT.word : AT.word + CODE] = codes
    for sort, tokens in sorts.items():
        weight[tokens, OTHER] = 0
        weight[tokens, coordinate(sort)] = 1


def _gather(attention: nn.Module) -> None:
    """Heads 0 to 3: nearest adjective, previous token, nearest noun, nearest question word."""
    query, key, value, out = _cleared(attention)
    unit = math.sqrt(HIDDEN / 3)
    sharp = math.sqrt(SHARP * math.sqrt(HEAD)) / unit
    step = math.sqrt(3 * SHARP * math.sqrt(HEAD)) / unit
    frequencies = THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    for i in NEAR:
        query[0, i, AT.one] = query[2, i, AT.one] = sharp
        key[0, i, coordinate("adjective")] = key[1, i, coordinate("noun")] = sharp
    for i in QUESTION:
        query[3, i, AT.one] = sharp
        for sort in ("who", "where", "when"):
            key[1, i, coordinate(sort)] = sharp
    for i in STEP:
        query[1, i, AT.one] = step * torch.cos(frequencies[i])
        query[1, i + HEAD // 2, AT.one] = -step * torch.sin(frequencies[i])
        key[0, i, AT.one] = step
    for i in range(CODE):
        value[:, i, AT.word + i] = 1 / unit
        out[0, i, AT.adjective + i] = out[2, i, AT.noun + i] = 1
    out[1, :CODE, AT.previous : AT.previous + 12] = torch.randn(CODE, 12) / math.sqrt(CODE)
    for i, sort in enumerate(("who", "where", "when")):
        value[1, CODE + i, coordinate(sort)] = 1 / unit
        out[3, CODE + i, AT.asked + i] = 1


def _match(attention: nn.Module) -> None:
    """Head 0 scores the sort of value wanted, the adjective and the noun, and copies the word."""
    query, key, value, out = _cleared(attention)
    for tensor in (query[1:], out[1:]):
        tensor.normal_(std=0.02)
    unit = math.sqrt(HIDDEN / 6)
    sharp = math.sqrt(MATCH * math.sqrt(HEAD)) / unit
    slow = [i + half for half in (0, HEAD // 2) for i in range(SLOW, HEAD // 2)]
    kinds, rest = slow[: len(VALUES)], slow[len(VALUES) :]
    for at, slots in (
        (AT.adjective, rest[: len(rest) // 2]),
        (AT.noun, rest[len(rest) // 2 :]),
    ):
        basis = torch.linalg.qr(torch.randn(CODE, len(slots)))[0].T * sharp
        query[0, slots, at : at + CODE] = basis * math.sqrt(CODE / len(slots))
        key[0, slots, at : at + CODE] = basis
    for slot, wanted, sort in zip(kinds, ("to", "in", "around"), VALUES, strict=True):
        query[0, slot, coordinate(wanted)] = sharp
        key[0, slot, coordinate(sort)] = sharp
    for i in range(CODE):
        value[0, i, AT.word + i] = 1 / unit
        out[0, i, AT.found + i] = COPY


def _read(weight: Tensor, sorts: dict[str, list[int]], codes: Tensor) -> None:
    weight.normal_(std=0.02)
    for before, after in FOLLOWS:
        weight[sorts[after], coordinate(before)] = 4
    reads = [("adjective", AT.adjective), ("noun", AT.noun)] + [(v, AT.found) for v in VALUES]
    for sort, at in reads:
        weight[sorts[sort], at : at + CODE] = (2 if at == AT.found else 4) * codes[sorts[sort]]


def _cleared(attention: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views, zeroed: query, key and value `[head, channel, hidden]`, out `[head, channel, hidden]`.

    `out` is a view of the transposed weight, so writing to it writes the projection.
    """
    projections = dict(attention.named_children())
    query, key, value, out = (
        projections[name].get_parameter("weight").zero_()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    return (
        query.view(HEADS, HEAD, HIDDEN),
        key.view(KV_HEADS, HEAD, HIDDEN),
        value.view(KV_HEADS, HEAD, HIDDEN),
        out.T.view(HEADS, HEAD, HIDDEN),
    )
