"""Naming and format of a KV block: what a block is called, and the bytes it is stored as.

Without I/O and without messages: the router, the engine and the store all import it, and none of
them imports another for it.
"""

from kvrelay.block.header import ExpectedBlock, Header
from kvrelay.block.name import Namer
from kvrelay.block.namespace import Namespace
from kvrelay.block.ranges import HeadRange
from kvrelay.block.verify import verify, verify_payload

__all__ = ["ExpectedBlock", "HeadRange", "Header", "Namer", "Namespace", "verify", "verify_payload"]
