"""Chooses the attention backend at start, and says why if it is not the best one."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.attention.backend import AttentionBackend
from kvrelay.engine.attention.native.backend import NativeBackend
from kvrelay.engine.attention.native.library import NoKernel
from kvrelay.engine.attention.pool import KVPool
from kvrelay.engine.attention.sdpa import SdpaBackend
from kvrelay.engine.attention.triton_backend import NoTriton, TritonBackend
from kvrelay.errors import Rejected


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend, and why "auto" could not have a better one (for people; empty: it is the best)."""

    backend: AttentionBackend
    reason: str = ""


def choose_attention(name: str, pool: KVPool) -> ChosenAttention:
    """The attention backend of this name over a pool.

    "auto" is the native kernel where it loads, passes its self-test and computes in the pool's
    dtype and on its device, else SDPA. ``Rejected`` if the name is unknown, or if this machine
    cannot run that backend.
    """
    if name not in ("auto", "sdpa", "native", "triton"):
        raise Rejected("attention_backend", f"{name!r} is not known: auto, sdpa, native or triton")
    if name == "sdpa":
        return ChosenAttention(SdpaBackend(pool))
    if name == "triton":
        try:
            return ChosenAttention(TritonBackend(pool))
        except NoTriton as error:
            raise Rejected("attention_backend", f"triton cannot be used: {error}") from error
    try:
        native = NativeBackend(pool)
    except NoKernel as error:
        reason = f"native cannot be used: {error}"
        if name == "native":
            raise Rejected("attention_backend", reason) from error
        return ChosenAttention(SdpaBackend(pool), reason)
    return ChosenAttention(native, "; ".join(native.kernel.shortcomings))
