"""The client library, for threads and for asyncio; applications import it from ``kvrelay``."""

from kvrelay.client.aio import AsyncClient, AsyncStream
from kvrelay.client.chunk import Choice, Chunk, Completion
from kvrelay.client.client import Client, Stream
from kvrelay.client.convert import Logprobs, TokenLogprob

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "Logprobs",
    "Stream",
    "TokenLogprob",
]
