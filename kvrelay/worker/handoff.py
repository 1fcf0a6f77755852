"""The handoff of a prefill leg, signed so that only the next leg of its request can use it.

The router carries the message. The signature covers the request's id and generation, the index of
the leg, the namespace with the tenant's salt, the prompt, and the handoff itself, framed so that no
two of them give the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

from kvrelay.block.name import NAME_BYTES, Namer
from kvrelay.errors import Mismatch, Rejected
from kvrelay.v1 import types_pb2

SIGNATURE_BYTES = 32
_DOMAIN = b"kvrelay.handoff.v1"
_NUMBERS = struct.Struct("<QIIII")


def sign(
    key: bytes | None, leg: types_pb2.Leg, space: bytes, tokens: int, last: bytes
) -> types_pb2.Handoff:
    """The handoff of a leg, unsigned without a key; ``space`` is its namespace's digest."""
    signature = b"" if key is None else _signature(key, leg, leg.leg_index, space, tokens, last)
    return types_pb2.Handoff(saved_tokens=tokens, last_block_name=last, signature=signature)


def check_signature(
    key: bytes | None, leg: types_pb2.Leg, space: bytes, handoff: types_pb2.Handoff
) -> None:
    """Raise ``Rejected`` for a malformed handoff, ``Mismatch`` for that of another leg."""
    if len(handoff.last_block_name) not in (0, NAME_BYTES):
        raise Rejected("handoff.last_block_name", f"must have {NAME_BYTES} bytes, or none")
    if len(handoff.signature) not in (0, SIGNATURE_BYTES):
        raise Rejected("handoff.signature", f"must have {SIGNATURE_BYTES} bytes, or none")
    if key is None or not handoff.saved_tokens:
        return
    before = (leg.leg_index - 1) % (1 << 32)
    expected = _signature(key, leg, before, space, handoff.saved_tokens, handoff.last_block_name)
    if not hmac.compare_digest(expected, handoff.signature):
        raise Mismatch(
            "handoff.signature",
            "was not made for this leg with the key of this fleet: give all workers the same key",
        )


def check_tokens(
    namer: Namer, block_size: int, tokens: Sequence[int], handoff: types_pb2.Handoff
) -> None:
    """Compare the last block's name, which commits to all before it, with that of ``tokens``."""
    if not handoff.saved_tokens:
        return
    covered = tokens[: handoff.saved_tokens]
    if len(covered) < handoff.saved_tokens:
        raise Rejected(
            "handoff.saved_tokens", f"{handoff.saved_tokens} of a leg of {len(covered)} tokens"
        )
    names = namer.chain(covered, block_size)
    name = names[-1] if names else namer.root
    if rest := covered[len(names) * block_size :]:
        name = namer.child(name, rest)
    if name != handoff.last_block_name:
        raise Mismatch(
            "handoff.last_block_name", "these blocks were not computed from these tokens"
        )


def _signature(
    key: bytes, leg: types_pb2.Leg, number: int, space: bytes, tokens: int, last: bytes
) -> bytes:
    prompt = struct.pack(f"<{len(leg.prompt_token_ids)}I", *leg.prompt_token_ids)
    name = leg.request_id.encode()
    numbers = _NUMBERS.pack(leg.generation_id, number, tokens, len(name), len(last))
    parts = (_DOMAIN, numbers, name, last, space, hashlib.sha256(prompt).digest())
    return hmac.digest(key, b"".join(parts), "sha256")
