"""Mistakes in the arguments of FlashAttention's calls, each of which the checks must find."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.engine.attention import flash_backend, flash_calls
from tests.engine.flash.checks import LIBRARIES, Modules, random_batches, random_options
from tests.mutants import module_of

SEEDS = range(4)

# What is wrong -> the text, and what stands there instead.
CALLS: Mapping[str, tuple[str, str]] = {
    "decode is split": ("_SPLITS = 1", "_SPLITS = 0"),
    "decode sees one key less": ("whole = (-1, -1)", "whole = (0, -1)"),
    "prefill is not causal": ("causal = (-1, 0)", "causal = (-1, -1)"),
    "prefill sees one key more": ("causal = (-1, 0)", "causal = (-1, 1)"),
    "prefill of the package is not causal": (
        "            entries.longest,\n            softmax_scale=scale,\n            causal=True,",
        "            entries.longest,\n            softmax_scale=scale,\n            causal=False,",
    ),
    "K stands for V": (
        "key,\n            value,\n            entries.rows,\n            entries.keys,  #",
        "key,\n            key,\n            entries.rows,\n            entries.keys,  #",
    ),
    "V stands for K": (
        "            query[:, None],\n            key,",
        "            query[:, None],\n            value,",
    ),
    "V and K are exchanged": (
        "            query[:, None],\n            key,\n            value,",
        "            query[:, None],\n            value,\n            key,",
    ),
    "offsets of K are those of Q": (
        "            entries.rows,\n            entries.keys,\n",
        "            entries.rows,\n            entries.rows,\n",
    ),
    "offsets of K are left out": ("entries.keys,  #", "None,  #"),
    "offsets of Q are those of K": (
        "            entries.rows,\n            entries.keys,  #",
        "            entries.keys,\n            entries.keys,  #",
    ),
    "the longest entry has as many rows as keys": (
        "entries.most_rows,\n            entries.longest,\n            scale",
        "entries.most_rows,\n            entries.most_rows,\n            scale",
    ),
    "no more rows than one": (
        "entries.most_rows,\n            entries.longest,\n            scale",
        "1,\n            entries.longest,\n            scale",
    ),
    "no more rows than one in the package": (
        "entries.most_rows,\n            entries.longest,\n            softmax_scale",
        "1,\n            entries.longest,\n            softmax_scale",
    ),
    "the scale is forgotten": ("            scale=scale,\n", ""),
    "the scale of prefill is forgotten": (
        "            entries.longest,\n            softmax_scale=scale,\n",
        "            entries.longest,\n",
    ),
    "the scale of decode is forgotten": (
        "block_table=entries.table,\n            softmax_scale=scale,",
        "block_table=entries.table,",
    ),
    "lengths are numbers of rows": ("seqused_k=entries.lengths", "seqused_k=entries.rows.diff()"),
    "lengths are without the new position": (
        "cache_seqlens=entries.lengths",
        "cache_seqlens=entries.lengths - 1",
    ),
    "lengths are of 64 bits": (
        "cache_seqlens=entries.lengths",
        "cache_seqlens=entries.lengths.long()",
    ),
    "no table": ("            block_table=entries.table,\n            **", "            **"),
    "grouped heads are not allowed": ("query.shape[1] != key.shape[2]", "False"),
    "a window is one key wider": ("options.window - 1, 0)", "options.window, 0)"),
    "a window has no end": ("options.window - 1, 0)", "options.window - 1, -1)"),
    "no window": ("if options.window else None", "if False else None"),
    "no soft cap": (
        '{"softcap": self.options.softcap} if self.options.softcap',
        "{} if self.options.softcap",
    ),
}
BACKEND: Mapping[str, tuple[str, str]] = {
    "prefill begins one entry early": ("slice(decodes, None)", "slice(max(decodes - 1, 0), None)"),
    "decode has one entry less": ("slice(0, decodes)", "slice(0, max(decodes - 1, 0))"),
    "all entries are in the second call": ("slice(decodes, None)", "slice(0, None)"),
    "tables begin at the first": ("places + spans[:, 3, None]", "places"),
    "tables are one block short": ("-(lengths // -block_size)", "lengths // block_size"),
    "tables begin one block late": (
        "np.arange(widths.max(initial=0))",
        "np.arange(1, widths.max(initial=0) + 1)",
    ),
    "tables run beyond their end": ("widths[:, None] - 1)", "widths[:, None])"),
    "lengths are those of contexts": (
        "whole = (_offsets(spans[:, 2]), _offsets(lengths), lengths, table)",
        "whole = (_offsets(spans[:, 2]), _offsets(spans[:, 1]), spans[:, 1], table)",
    ),
    "offsets count entries": ("_offsets(spans[:, 2])", "np.arange(len(spans) + 1)"),
    "offsets do not begin at 0": (
        "np.concatenate(([0], np.cumsum(counts)))",
        "np.concatenate((counts[:1], np.cumsum(counts)))",
    ),
    "offsets are not summed": ("np.cumsum(counts)", "counts"),
    "the first entry has the most rows": (
        "int(spans[:, 2].max(initial=0))",
        "int(spans[:1, 2].max(initial=0))",
    ),
    "the fewest keys bound the call": (
        "int(lengths.max(initial=0))",
        "int(lengths.min(initial=1 << 30))",
    ),
    "V is stored where K is": ("(rows, rows + shape.block_size)", "(rows, rows)"),
    "heads are stored side by side": ("* shape.head_runs", "* 2"),
    "every position is stored in the first": ("+ offsets[:, None]", "+ 0 * offsets[:, None]"),
    "every layer reads the first": ("by_position[:, layer]", "by_position[:, 0]"),
    "K and V are exchanged": ("keys, values = self", "values, keys = self"),
    "every layer is stored in the first": ("store(layer, self", "store(0, self"),
    "attended before it is stored": (
        "self.pool.store(layer, self.places, key, value)",
        "self.pool.store(layer, self.places[:0], key[:0], value[:0])",
    ),
    "scales are inverted": ("query.shape[2] ** -0.5", "query.shape[2] ** 0.5"),
    "the given scale is forgotten": ("if scaling is None else scaling", ""),
    "rows of decode are attended again": ("rows[cut:], keys", "rows, keys"),
    "results are exchanged": ("torch.cat(made)", "torch.cat(made[::-1])"),
    "strides are not looked at": (
        "return query if fits",
        "return query if query.stride(2) == 1",
    ),
    "rows of logits are positions": (
        "batch.positions[None], batch.logit_rows)",
        "batch.positions[None], batch.positions[batch.logit_rows])",
    ),
    "tokens are positions": ("narrow = (batch.tokens[None]", "narrow = (batch.positions[None]"),
}


def survives(module: str, name: str) -> bool:
    """Whether no check notices a mistake."""
    mistaken = (
        Modules(module_of(flash_calls, [CALLS[name]]), flash_backend)
        if module == "calls"
        else Modules(flash_calls, module_of(flash_backend, [BACKEND[name]]))
    )
    for seed in SEEDS:
        for library in LIBRARIES:
            for check in (random_options, random_batches):
                try:
                    check(mistaken, library, seed)
                except Exception:  # noqa: BLE001 - a mistake may raise anything
                    return False
    return True
