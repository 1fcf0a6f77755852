"""Names of blocks: a SHA-256 chain over namespace, parent name, count and token ids.

Two blocks have one name only if everything before them and in them is equal. The count is part of
it, so a partial block has a name like any other, and never that of a longer one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from kvrelay.block.namespace import Namespace
from kvrelay.errors import Rejected

NAME_BYTES = 32
FAMILY_BITS = 16
FAMILY_MASK = (1 << FAMILY_BITS) - 1
MAX_TENANTS = 1024  # whose namers are kept

Digest = Callable[[bytes], bytes]
"""Bytes in, 32 bytes out. Tests of collisions use a weaker one than SHA-256."""

_ROOT = b"kvrelay.root.v1".ljust(32, b"\0")
_CHILD = b"kvrelay.child.v1".ljust(32, b"\0")
_FIRST_BLOCK = b"kvrelay.opening.v1"


def sha256(data: bytes) -> bytes:
    """The digest that names are made with."""
    return hashlib.sha256(data).digest()


@lru_cache(maxsize=1024)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<I{count}I")


def root_name(namespace: bytes, digest: Digest = sha256) -> bytes:
    """Name before the first block; ``namespace`` is the namespace's digest."""
    return digest(_ROOT + namespace)


def child_name(
    namespace: bytes, parent: bytes, tokens: Sequence[int], digest: Digest = sha256
) -> bytes:
    """Name of the block of ``tokens`` after ``parent``; ``namespace`` is the namespace's digest.

    A header holds all of these, so a reader of the header can check the name.
    """
    try:
        packed = _packer(len(tokens)).pack(len(tokens), *tokens)
    except struct.error as error:
        raise Rejected("tokens", f"token ids must be integers below 2**32: {error}") from error
    return digest(_CHILD + namespace + parent + packed)


def name_after(namespace: bytes, parent: bytes, words: bytes, digest: Digest = sha256) -> bytes:
    """``child_name`` of token ids as a header has them: 32 bits each, little-endian."""
    count = len(words) // 4
    return digest(b"".join((_CHILD, namespace, parent, count.to_bytes(4, "little"), words)))


class Namer:
    """Makes the names of one namespace. Stateless, so any thread may use it."""

    def __init__(self, namespace: Namespace, digest: Digest = sha256) -> None:
        self._space = namespace
        self._digest = digest
        self.namespace = namespace.digest
        self.root = root_name(self.namespace, digest)
        self._tenant_key = hashlib.sha256(_FIRST_BLOCK + namespace.tenant_salt).digest()
        self._family = int.from_bytes(namespace.family[:8]) & FAMILY_MASK

    def within(self, salt: bytes) -> Namer:
        """The namer of the tenant with this salt; this one for the empty salt."""
        return _of_tenant(self._space, salt, self._digest) if salt else self

    def child(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Name of the block that holds ``tokens`` after the block ``parent``."""
        return child_name(self.namespace, parent, tokens, self._digest)

    def first_block_hash(self, tokens: Sequence[int]) -> int:
        """64 bits by which the store knows a sequence's first block under another namespace.

        All namespaces of one tenant share the upper bits, which reveal nothing about blocks of
        other tenants; namespaces that differ in the numeric profile alone share the lower
        ``FAMILY_BITS`` too.
        """
        packed = _packer(len(tokens)).pack(len(tokens), *tokens)
        hashed = hashlib.blake2b(packed, digest_size=8, key=self._tenant_key)
        return int.from_bytes(hashed.digest()) & ~FAMILY_MASK | self._family

    def chain(self, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Names of the full blocks of ``tokens``, in order."""
        names, parent = [], self.root
        for end in range(block_size, len(tokens) + 1, block_size):
            parent = self.child(parent, tokens[end - block_size : end])
            names.append(parent)
        return names


@lru_cache(MAX_TENANTS)
def _of_tenant(namespace: Namespace, salt: bytes, digest: Digest) -> Namer:
    return Namer(namespace.of_tenant(salt), digest)
