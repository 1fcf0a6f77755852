"""How much text one token can stand for: a text too long for a model is refused unread.

A tokenizer may shorten text in each of its steps, or drop it without a token. A step that is not
known here counts as one that drops text. Then there is no bound: a bound must never refuse a text
that fits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from math import prod
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Step: TypeAlias = Mapping[str, object]  # as in tokenizer.json

CHARACTER = 4
"""Bytes of a character at most: a step that leaves at least a byte of each divides by no more."""

DECOMPOSED = 3
"""Bytes of a composed character's canonical decomposition, for each byte of it, at most."""

_SHRINKS = {
    "Lowercase": CHARACTER,
    "NFD": CHARACTER,
    "NFKD": CHARACTER,
    "NFC": CHARACTER * DECOMPOSED,
    "NFKC": CHARACTER * DECOMPOSED,
}
_KEEPS = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend", "UnicodeScripts"})
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def bytes_per_token(backend: Backend) -> int | None:
    """The most bytes of text that become one token; ``None`` if there is no such number."""
    normalizers = _steps(backend.normalizer, "normalizers")
    splitters = _steps(backend.pre_tokenizer, "pretokenizers")
    shrinks = [_shrinks(step) for step in normalizers]
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    strips = any(token.lstrip or token.rstrip for token in added.values())  # any number of spaces
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    if strips or not all(map(_keeps, splitters)) or not _covers(backend, vocabulary, byte_level):
        return None
    longest = CHARACTER  # an unknown character may be a token
    for token in vocabulary:
        if token in added:
            longest = max(longest, len(token.encode()), len(_normalized(backend, token)))
        else:
            longest = max(longest, len(token) if byte_level else len(token.encode()))
    known = [times for times in shrinks if times is not None]
    return longest * prod(known) if len(known) == len(shrinks) else None


def _steps(part: object, sequence: str) -> list[Step]:
    """The steps of a normalizer or pre-tokenizer, those of sequences in place of the sequences."""
    if part is None:
        return []
    state = cast("bytes", part.__getstate__())
    steps = [cast("Step", json.loads(state))]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [
            inner
            for step in steps
            for inner in (cast("list[Step]", step[sequence]) if sequence in step else [step])
        ]
    return steps


def _shrinks(step: Step) -> int | None:
    """Bytes of text for which a normalizer leaves one at most; ``None``: it may drop text."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return -(len(old.encode()) // -len(new.encode()))
        case {"type": str(kind)} if kind in _KEEPS:
            return 1
        case {"type": str(kind)}:
            return _SHRINKS.get(kind)
    return None


def _keeps(step: Step) -> bool:
    """Whether a pre-tokenizer drops no character."""
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _KEEPS


def _covers(backend: Backend, vocabulary: Set[str], byte_level: bool) -> bool:
    """Whether a model drops no character and makes no token of several unknown ones."""
    from tokenizers import models, pre_tokenizers

    model = backend.model
    if not isinstance(model, models.BPE):
        return False  # the others make one token of a whole unknown word
    if byte_level:
        return vocabulary >= set(pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback:
        return vocabulary >= _BYTE_TOKENS
    return model.unk_token is not None and not model.fuse_unk


def _normalized(backend: Backend, text: str) -> bytes:
    normalizer = backend.normalizer
    return (text if normalizer is None else normalizer.normalize_str(text)).encode()
