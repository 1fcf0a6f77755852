"""Naming and format of a KV block: what a block is called, and the bytes it is stored as.

Without I/O and without messages, so that the router, the engine and the store can all speak of
blocks without knowing one another.
"""

from kvblock.header import Header
from kvblock.name import Namer
from kvblock.namespace import Namespace
from kvblock.verify import Wanted, verify, verify_payload

__all__ = ["Header", "Namer", "Namespace", "Wanted", "verify", "verify_payload"]
