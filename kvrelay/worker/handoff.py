"""The hand-off from a prefill leg to the leg after it, signed so that it counts for that one only.

The router carries it. What the signature covers is framed, so that no two hand-offs have the same
bytes: the request's id and generation, the number of the leg, the namespace with the tenant's salt,
the prompt, and what is handed over.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.block.name import NAME_BYTES, Namer
from kvrelay.errors import Mismatch, Rejected
from kvrelay.v1 import types_pb2

SIGNATURE_BYTES = 32
_DOMAIN = b"kvrelay.handoff.v1"
_NUMBERS = struct.Struct("<QIIII")


@dataclass(frozen=True, slots=True)
class Handoff:
    """So many leading tokens are in the store, and the name of the last of their blocks."""

    tokens: int
    last_name: bytes
    signature: bytes = b""


def sign(key: bytes | None, leg: types_pb2.Leg, space: bytes, tokens: int, last: bytes) -> Handoff:
    """What a prefill leg hands over; unsigned without a key. ``space``: its namespace's digest."""
    signature = b"" if key is None else _signature(key, leg, leg.number, space, tokens, last)
    return Handoff(tokens, last, signature)


def check_signature(key: bytes | None, leg: types_pb2.Leg, space: bytes, handoff: Handoff) -> None:
    """Raise ``Rejected`` for one that is none, ``Mismatch`` for one made for another leg."""
    if len(handoff.last_name) not in (0, NAME_BYTES):
        raise Rejected("handoff_last_name", f"must have {NAME_BYTES} bytes, or none")
    if len(handoff.signature) not in (0, SIGNATURE_BYTES):
        raise Rejected("handoff_signature", f"must have {SIGNATURE_BYTES} bytes, or none")
    if key is None or not handoff.tokens:
        return
    before = (leg.number - 1) % (1 << 32)
    made = _signature(key, leg, before, space, handoff.tokens, handoff.last_name)
    if not hmac.compare_digest(made, handoff.signature):
        raise Mismatch(
            "handoff_signature",
            "was not made for this leg with the key of this fleet: do all workers have the same?",
        )


def check_tokens(namer: Namer, block_size: int, tokens: Sequence[int], handoff: Handoff) -> None:
    """Compare its last name, which commits to all before it, with that of our own ``tokens``."""
    if not handoff.tokens:
        return
    covered = tokens[: handoff.tokens]
    if len(covered) < handoff.tokens:
        raise Rejected("handoff_tokens", f"{handoff.tokens} of a leg of {len(covered)} tokens")
    names = namer.chain(covered, block_size)
    name = names[-1] if names else namer.root
    if rest := covered[len(names) * block_size :]:
        name = namer.child(name, rest)
    if name != handoff.last_name:
        raise Mismatch("handoff_last_name", "these blocks were not computed from these tokens")


def _signature(
    key: bytes, leg: types_pb2.Leg, number: int, space: bytes, tokens: int, last: bytes
) -> bytes:
    prompt = struct.pack(f"<{len(leg.prompt_token_ids)}I", *leg.prompt_token_ids)
    name = leg.request_id.encode()
    numbers = _NUMBERS.pack(leg.generation, number, tokens, len(name), len(last))
    parts = (_DOMAIN, numbers, name, last, space, hashlib.sha256(prompt).digest())
    return hmac.digest(key, b"".join(parts), "sha256")
