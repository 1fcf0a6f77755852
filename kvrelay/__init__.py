"""kvrelay: LLM serving with prefill and decode on separate workers, exact to the token.

``from kvrelay import Client, AsyncClient`` is the library. Names are imported on first use, so
that the package itself costs nothing; the base install has all that they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvrelay.version import VERSION

if TYPE_CHECKING:
    from kvrelay.client import (
        AsyncClient,
        AsyncStream,
        Choice,
        Chunk,
        Client,
        Completion,
        Logprobs,
        Stream,
        TokenLogprob,
    )
    from kvrelay.errors import (
        Corrupt,
        DeadlineExceeded,
        Draining,
        Exhausted,
        KvrelayError,
        Mismatch,
        NotFound,
        NotInstalled,
        Rejected,
        Unavailable,
        Unservable,
    )
    from kvrelay.fleet import (
        FleetStatus,
        QueueStatus,
        RouterTotals,
        WorkerInfo,
        WorkerLoad,
        WorkerNamespace,
        WorkerStatus,
    )
    from kvrelay.sampling import Sampling
    from kvrelay.structured import StructuredOutput
    from kvrelay.tools import ToolCall, ToolCallDelta
    from kvrelay.usage import LegAdmission, LegUsage, Miss, MissedBlocks, StoreTokens, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Corrupt",
    "DeadlineExceeded",
    "Draining",
    "Exhausted",
    "FleetStatus",
    "KvrelayError",
    "LegAdmission",
    "LegUsage",
    "Logprobs",
    "Mismatch",
    "Miss",
    "MissedBlocks",
    "NotFound",
    "NotInstalled",
    "QueueStatus",
    "Rejected",
    "RouterTotals",
    "Sampling",
    "StoreTokens",
    "Stream",
    "StructuredOutput",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Unavailable",
    "Unservable",
    "Usage",
    "WorkerInfo",
    "WorkerLoad",
    "WorkerNamespace",
    "WorkerStatus",
    "__version__",
]
__version__ = VERSION
_MODULES = (
    "kvrelay.errors",
    "kvrelay.usage",
    "kvrelay.fleet",
    "kvrelay.sampling",
    "kvrelay.structured",
    "kvrelay.tools",
    "kvrelay.client",
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in map(import_module, _MODULES):
            value: object = getattr(module, name, None)
            if value is not None:
                globals()[name] = value
                return value
    raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
