"""The bound on a text's size never refuses a text that fits, whatever the tokenizer drops."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvrelay import recall
from kvrelay.text import tokenizer as ours
from kvrelay.text.bound import bytes_per_token
from tests.text.kinds import CORPUS, KINDS, byte_level, gemma, llama2

# Text that a step may shorten or drop: composed and compatible forms, spaces, controls, unknown
# characters, added tokens, and the longest tokens of the vocabulary, which the test appends.
SHORTENED = ["\u212a", "\U0001d400", "e\u0323\u0302", "\u1103\u1173", " ", "\n", "\x00", "漢", "🎉"]
PIECES = [*CORPUS[:4], *SHORTENED]


def normalized(step: normalizers.Normalizer) -> Tokenizer:
    backend = byte_level()
    backend.normalizer = step
    return backend


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "lowercase": lambda: normalized(normalizers.Lowercase()),
    "replace": lambda: normalized(normalizers.Replace("aaaa", "b")),
    "NFC": lambda: normalized(normalizers.NFC()),
    "NFKC": lambda: normalized(normalizers.NFKC()),
    "NFD": lambda: normalized(normalizers.NFD()),
}


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("seed", range(3))
def test_no_text_is_longer_than_its_tokens_allow(kind: str, seed: int) -> None:
    backend, chance = BOUNDED[kind](), random.Random(seed)
    most = bytes_per_token(backend)
    assert most is not None
    longest = sorted(backend.get_vocab(), key=len)[-5:]
    spelled = [backend.decode([backend.get_vocab()[token]]) for token in longest]
    pieces = [*PIECES, *spelled, "<s>", "<think> é", "aaaa" * 20]
    for piece in pieces:  # each alone, repeated: the worst ratio that it has
        text = piece * 50
        assert len(text.encode()) <= most * len(backend.encode(text).ids), piece
    for _ in range(50):
        text = "".join(chance.choices(pieces, k=20))
        assert len(text.encode()) <= most * len(backend.encode(text).ids), text


def stripping() -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<|end|>", rstrip=True)])
    return backend


def fused() -> Tokenizer:
    vocabulary = {"<unk>": 0, "a": 1}
    return Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True))


def split(behavior: str) -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), behavior), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return backend


UNBOUNDED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "spaces beside an added token": (stripping, "<|end|>" + " " * 9000),
    "unknown characters fused": (fused, "漢" * 9000),
    "unknown characters dropped": (lambda: Tokenizer(models.BPE({"a": 0}, [])), "a" + "漢" * 9000),
    "spaces removed": (lambda: split("removed"), "a" + " " * 9000),
    "controls removed": (lambda: normalized(normalizers.BertNormalizer()), "a" + "\x01" * 9000),
    "regular expression": (lambda: normalized(normalizers.Replace(Regex("x+"), "x")), "x" * 9000),
    "replaced by nothing": (lambda: normalized(normalizers.Replace("x", "")), "a" + "x" * 9000),
    "unknown word": (KINDS["word_piece"], "漢" * 9000),
    "unigram": (KINDS["unigram"], "龘" * 9000),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_a_tokenizer_that_may_drop_text_has_no_bound(kind: str) -> None:
    make, text = UNBOUNDED[kind]
    backend = make()
    assert bytes_per_token(backend) is None
    assert len(backend.encode(text).ids) < 10  # rightly so: this text would fit


def test_isolated_pieces_are_kept() -> None:
    assert bytes_per_token(split("isolated")) == bytes_per_token(byte_level())


def test_the_shipped_model(tmp_path: Path) -> None:
    """4,096 positions of at most 13 bytes: 53 KB."""
    tokenizer = ours.Tokenizer(Path(recall.__file__).parent / "model")
    assert tokenizer.bytes_per_token == 13
    fits = "<|assistant|>" * 4096
    assert len(tokenizer.encode(fits)) == 4096
    assert tokenizer.check_size(fits, "prompt", 4096) == 4096 * 13
    with pytest.raises(ours.TextTooLong, match=r"53249 bytes, and the 4096 positions .* 53248"):
        tokenizer.check_size(fits + "x", "prompt", 4096)
    spaces = Tokenizer(models.WordPiece({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=spaces).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    assert ours.Tokenizer(tmp_path).check_size("x" * 10_000, "prompt", 1) == 10_000
