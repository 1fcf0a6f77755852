"""Token ids to text one by one: the parts joined equal the decoding of all tokens at once.

Byte-level tokenizers (GPT-2, Llama 3, Qwen) use a table of bytes per token and an incremental UTF-8
decoder: exact for any ids, in constant time. Others (sentencepiece-like) are decoded behind an
anchor token, so that a leading space is kept or dropped as in the middle of a text; a token that
ends within a character waits for the next. That is exact too, except for byte tokens that are not
UTF-8: the library replaces every byte of such a run, but the bytes before the bad one were sent
before it came. (``tokenizers.DecodeStream`` has no flush, raises on such runs, and rereads a window
that grows without bound.)
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, Protocol

from tokenizers import Tokenizer as Backend

from kvrelay.errors import Unservable
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes, hence tokens, of an incomplete character


class Detokenizer(Protocol):
    """One stream of tokens."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly none; never half a character."""
        ...

    def flush(self) -> str:
        """The text still waiting at the end; replacement characters for incomplete ones."""
        ...


def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """A new detokenizer of the kind that this tokenizer needs."""
    if isinstance(tokenizer, NoTokenizer):
        return NoText()
    if _is_byte_level(tokenizer.backend):
        return ByteLevelDetokenizer(tokenizer)
    return AnchoredDetokenizer(tokenizer)


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """What a token adds to a text, in bytes; nothing for a special token.

    A text's first token may add less: some decoders strip the first space.
    """
    if _is_byte_level(tokenizer.backend):
        return _token_bytes(tokenizer).__getitem__
    anchor, text = _anchor(tokenizer)
    raw = _byte_tokens(tokenizer.backend)

    def one(token: int) -> bytes:
        if token in raw:
            return bytes((raw[token],))
        return tokenizer.decode([anchor, token]).removeprefix(text).encode()

    return one


class NoText:
    """For models without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteLevelDetokenizer:
    """For decoders that map every character of a token to one byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = _token_bytes(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class AnchoredDetokenizer:
    """For any other decoder whose output depends on neighbours only at the start of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._special = tokenizer.special_ids
        anchor, text = _anchor(tokenizer)
        self._anchor = anchor
        self._anchor_text = text
        self._bytes = _byte_tokens(tokenizer.backend)
        self._pending: list[int] = []
        self._begun = False

    def push(self, token: int) -> str:
        if token in self._special or self._backend.id_to_token(token) is None:
            return ""
        if not self._bytes:
            return self._push_piece(token)
        if token not in self._bytes:
            return self.flush() + self._decode([token])
        return self._push_byte(token)

    def flush(self) -> str:
        return self._decode(self._pending) if self._pending else ""

    def _push_piece(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._pending, peek=True)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self.flush()

    def _push_byte(self, token: int) -> str:
        broken = ""
        if _state(self._raw(token)) == "broken":
            broken = self.flush()
        self._pending.append(token)
        return broken if _state(self._raw()) == "incomplete" else broken + self.flush()

    def _raw(self, *more: int) -> bytes:
        return bytes(self._bytes[token] for token in (*self._pending, *more))

    def _decode(self, tokens: list[int], peek: bool = False) -> str:
        if self._begun:
            text = self._backend.decode([self._anchor, *tokens]).removeprefix(self._anchor_text)
        else:
            text = self._backend.decode(tokens)
        if not peek:
            self._begun = True
            self._pending = []
        return text


def _state(raw: bytes) -> Literal["whole", "incomplete", "broken"]:
    """Whether these bytes are characters, the beginning of one, or neither."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return "incomplete" if error.reason == "unexpected end of data" else "broken"
    return "whole"


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer, filled on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._backend = tokenizer.backend
        self._special = tokenizer.special_ids

    def __missing__(self, token: int) -> bytes:
        piece = None if token in self._special else self._backend.id_to_token(token)
        if piece is None:
            return b""  # special, or outside the vocabulary: not stored, so the table is bounded
        raw = self[token] = _piece_bytes(piece)
        return raw


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: Tokenizer) -> _TokenBytes:
    return _TokenBytes(tokenizer)


@lru_cache(maxsize=8)
def _anchor(tokenizer: Tokenizer) -> tuple[int, str]:
    """A token of plain letters: a token decoded behind it is decoded as in mid-text."""
    first = tokenizer.backend.encode("a", add_special_tokens=False).ids
    for token in (*first, *range(tokenizer.vocab_size)):
        text = tokenizer.decode([token])
        if text.isascii() and text.isalnum() and tokenizer.decode([token, token]).startswith(text):
            return token, text
    raise Unservable("this tokenizer has no token that decodes to plain letters")


@lru_cache(maxsize=8)
def _byte_tokens(backend: Backend) -> dict[int, int]:
    """The byte that each token like <0x0A> stands for, if the decoder has byte fallback."""
    if '"ByteFallback"' not in json.dumps(json.loads(backend.to_str()).get("decoder")):
        return {}
    found = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {token: byte for token, byte in found.items() if token is not None}


@lru_cache(maxsize=8)
def _is_byte_level(backend: Backend) -> bool:
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def _piece_bytes(piece: str) -> bytes:
    table = _character_bytes()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()  # an added token with characters that stand for themselves


@lru_cache(maxsize=1)
def _character_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
