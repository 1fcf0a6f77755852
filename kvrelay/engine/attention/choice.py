"""Chooses the attention backend at start, and says why if it is not the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvrelay.engine.attention.backend import AttentionBackend
from kvrelay.engine.attention.flash_backend import FlashBackend
from kvrelay.engine.attention.flash_calls import NoFlash, open_flash_attn, open_varlen
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.library import NoKernel
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.attention.triton_backend import NoTriton, TritonBackend
from kvrelay.engine.cuda.flash_conditions import PAGE
from kvrelay.errors import Rejected


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend, and why "auto" could not have a better one (for people; empty: it is the best)."""

    backend: AttentionBackend
    reason: str = ""


_FORCED: Mapping[str, Callable[[KVPool], AttentionBackend]] = {
    "sdpa": SdpaBackend,
    "native": NativeBackend,
    "triton": TritonBackend,
    "varlen": lambda pool: FlashBackend(pool, open_varlen(pool)),
    "flash_attn": lambda pool: FlashBackend(pool, open_flash_attn(pool)),
}


def choose_attention(name: str, pool: KVPool) -> ChosenAttention:
    """The attention backend of this name over a pool.

    "auto" is the native kernel if it loads, passes its self-test and supports the pool's dtype and
    device, else SDPA; a worker on a GPU resolves "auto" before (``kvrelay.engine.step_down``).
    ``Rejected`` if the name is unknown, or if this machine cannot run the backend.
    """
    if name == "auto":
        return _automatic(pool)
    if name not in _FORCED:
        *others, last = ("auto", *_FORCED)
        known = f"{', '.join(others)} or {last}"
        raise Rejected("attention_backend", f"{name!r} is not known: {known}")
    try:
        return ChosenAttention(_FORCED[name](pool))
    except (NoKernel, NoTriton, NoFlash) as error:
        raise Rejected("attention_backend", f"{name} cannot be used: {error}") from error


def least_block_size(name: str) -> int:
    """The smallest block size, in positions, that a backend supports."""
    return PAGE if name in ("varlen", "flash_attn") else 1


def _automatic(pool: KVPool) -> ChosenAttention:
    try:
        native = NativeBackend(pool)
    except NoKernel as error:
        return ChosenAttention(SdpaBackend(pool), f"native cannot be used: {error}")
    return ChosenAttention(native, "; ".join(native.kernel.shortcomings))
