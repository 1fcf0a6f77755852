"""Naming and format of a KV block: what a block is called, and the bytes it is stored as.

Without I/O and without messages, so that the router, the engine and the store can all speak of
blocks without knowing one another.
"""

from kvrelay.block.header import Header
from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.block.verify import ExpectedBlock, verify, verify_payload

__all__ = ["ExpectedBlock", "Header", "Namer", "Namespace", "verify", "verify_payload"]
