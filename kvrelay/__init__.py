"""kvrelay: LLM serving with prefill and decode on separate workers, exact to the token.

``from kvrelay import Client, AsyncClient`` is the library; it is imported on first use, so
that the package itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvrelay.version import VERSION

if TYPE_CHECKING:
    from kvrelay.client.client import AsyncClient, Chunk, Client, Completion

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "__version__"]
__version__ = VERSION


def __getattr__(name: str) -> object:
    if name in __all__:
        value: object = getattr(import_module("kvrelay.client.client"), name)
        return value
    raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
