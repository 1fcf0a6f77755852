"""Calls of FlashAttention 2 over paged KV: torch's ``varlen_attn`` and the package ``flash_attn``.

Neither has run on a GPU yet (docs/gpu.md). Decode and prefill entries are separate calls, so the
choice of a kernel for a row does not depend on the other entries of a step. KV is never split: the
number of splits depends on the longest context of a batch, and torch 2.13 computes wrong numbers
with more than one (pytorch/pytorch#194167).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.cuda.arguments import PLAIN, AttentionOptions
from kvrelay.engine.cuda.flash_conditions import (
    device_reasons,
    flash_attn_reasons,
    varlen_reasons,
)

REVISION = 1
"""Increase it with every change of a result's bits."""

_SPLITS = 1

Call = Callable[..., torch.Tensor]


class NoFlash(Exception):
    """FlashAttention cannot be used here; the message has every reason."""


@dataclass(frozen=True, slots=True)
class FlashEntries:
    """The ``n`` entries of one call: int32 tensors on the device.

    ``lengths`` [n] counts the keys of each entry: its context and its own positions. ``rows`` and
    ``keys`` [n + 1] are cumulative numbers of query rows and keys. ``table`` [n, widest] has the
    blocks of each entry in order. ``most_rows`` and ``longest`` are the largest of one entry.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    most_rows: int
    longest: int


class FlashCalls(Protocol):
    """Attends Q [rows, heads, head dim] over K and V [block, position, kv head, head dim]."""

    @property
    def name(self) -> str:
        """The value of ``--attention-backend``."""

    @property
    def profile(self) -> str:
        """For the numeric profile."""

    def decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        """Entries of one row each; it sees every key of its entry."""

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        """Causal entries of any number of rows; the last row sees every key of its entry."""


@dataclass(frozen=True, slots=True)
class VarlenCalls:
    """``torch.nn.attention.varlen.varlen_attn``."""

    function: Call
    options: AttentionOptions = PLAIN
    name = "varlen"
    profile = f"varlen-{REVISION}"  # torch's version is elsewhere in the numeric profile

    def decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        # Without a bound on the right the kernel computes the heads of a group together.
        whole = (-1, -1)
        return self._call(query, key, value, entries, scale, whole)

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        causal = (-1, 0)
        return self._call(query, key, value, entries, scale, causal)

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
        unbounded: tuple[int, int],
    ) -> torch.Tensor:
        return self.function(
            query,
            key,
            value,
            entries.rows,
            entries.keys,  # "optional", but its kernel refuses offsets of Q without those of K
            entries.most_rows,
            entries.longest,
            scale=scale,
            window_size=_window(self.options) or unbounded,
            enable_gqa=query.shape[1] != key.shape[2],
            seqused_k=entries.lengths,
            block_table=entries.table,
            num_splits=_SPLITS,
        )


@dataclass(frozen=True, slots=True)
class FlashAttnCalls:
    """``flash_attn_varlen_func`` and ``flash_attn_with_kvcache`` of the package ``flash_attn``.

    The first has no argument for the number of splits: it splits only where no entry has more than
    one row, and such entries of prefill have one key.
    """

    prefill_function: Call
    decode_function: Call
    version: str
    options: AttentionOptions = PLAIN
    name = "flash_attn"

    @property
    def profile(self) -> str:
        return f"flash_attn-{REVISION}-{self.version}"

    def decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        return self.decode_function(
            query[:, None],
            key,
            value,
            cache_seqlens=entries.lengths,
            block_table=entries.table,
            softmax_scale=scale,
            causal=True,
            window_size=_window(self.options) or (-1, -1),
            num_splits=_SPLITS,
            **self._cap(),
        )[:, 0]

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: FlashEntries,
        scale: float,
    ) -> torch.Tensor:
        return self.prefill_function(
            query,
            key,
            value,
            entries.rows,
            entries.keys,
            entries.most_rows,
            entries.longest,
            softmax_scale=scale,
            causal=True,
            window_size=_window(self.options) or (-1, -1),
            block_table=entries.table,
            **self._cap(),
        )

    def _cap(self) -> dict[str, float]:
        """Passed only if there is a cap: old versions lack the argument."""
        return {"softcap": self.options.softcap} if self.options.softcap else {}


def open_varlen(pool: KVPool, options: AttentionOptions = PLAIN) -> VarlenCalls:
    """The call of torch over a pool; ``NoFlash`` if it cannot be used."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError as error:
        raise NoFlash(f"torch {torch.__version__} has no varlen_attn") from error
    function = cast(Call, module.varlen_attn)
    own = [*device_reasons(pool.device)]
    if not own and not torch.backends.cuda.is_flash_attention_available():
        own.append(f"torch {torch.__version__} was built without FlashAttention")
    _refuse((*own, *varlen_reasons(pool.by_position, options, function)))
    return VarlenCalls(function, options)


def open_flash_attn(pool: KVPool, options: AttentionOptions = PLAIN) -> FlashAttnCalls:
    """The calls of the package over a pool; ``NoFlash`` if they cannot be used."""
    try:
        module = importlib.import_module("flash_attn")
        functions = [getattr(module, name) for name in _FLASH_ATTN]
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            raise NoFlash("the package flash_attn is not installed") from error
        raise NoFlash(f"the package flash_attn cannot be imported: {error}") from error
    except (ImportError, AttributeError) as error:  # built for another torch, or another package
        raise NoFlash(f"the package flash_attn cannot be imported: {error}") from error
    prefill, decode = functions
    _refuse(
        (
            *device_reasons(pool.device),
            *flash_attn_reasons(pool.by_position, options, prefill, decode),
        )
    )
    return FlashAttnCalls(prefill, decode, str(getattr(module, "__version__", "?")), options)


_FLASH_ATTN = ("flash_attn_varlen_func", "flash_attn_with_kvcache")


def _refuse(reasons: tuple[str, ...]) -> None:
    if reasons:
        raise NoFlash("; ".join(reasons))


def _window(options: AttentionOptions) -> tuple[int, int] | None:
    """Visible keys before and after a position; ``options.window`` counts the position too."""
    return (options.window - 1, 0) if options.window else None
