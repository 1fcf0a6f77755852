"""The key of a fleet's blocks, and the tag by which its members know them.

A tag covers every byte of a block: keyed BLAKE2b over the header (all but its checksum and the tag)
and over a hash of the payload. The hash is GHASH under a secret key, computed by AES-GCM with the
payload as associated data: it is never shown, so it needs no nonce, and equal hashes of two
payloads cannot be found without the key (hash-then-PRF; Wegman and Carter 1981, Shoup 1996).
GHASH runs at 20 GB/s where BLAKE2b and SHA-256 run at 1 to 2.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrelay.block.header import TAG_BYTES, Buffer

_TAG_KEY = b"kvrelay.block-tag.v1"
_HASH_KEY = b"kvrelay.block-hash.v1"
_PROOF = b"kvrelay-refusal"
_CONSTANT = bytes(12)
"""A constant nonce masks every hash equally; only tags leave this class."""


class BlockKey:
    """Makes tags; derived from the fleet key. Thread-safe."""

    def __init__(self, fleet_key: bytes) -> None:
        self._tag_key = hmac.digest(fleet_key, _TAG_KEY, "sha256")
        self._hash = AESGCM(hmac.digest(fleet_key, _HASH_KEY, "sha256"))

    @classmethod
    def of(cls, fleet_key: bytes | None) -> BlockKey | None:
        """The key of blocks of a fleet; ``None`` without a fleet key."""
        return None if fleet_key is None else cls(fleet_key)

    def tag(self, header: bytes, payload: Buffer) -> bytes:
        """The tag of a block; ``header`` is its header without checksum and tag."""
        hashed = self._hash.encrypt(_CONSTANT, b"", payload)
        made = hashlib.blake2b(header, digest_size=TAG_BYTES, key=self._tag_key)
        made.update(hashed)
        return made.digest()

    def proof(self, name: bytes) -> bytes:
        """Proves to another holder of the key that this one refuses the block ``name``."""
        return hashlib.blake2b(
            name, digest_size=TAG_BYTES, key=self._tag_key, person=_PROOF
        ).digest()
