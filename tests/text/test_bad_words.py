"""Bad words become the token sequences of both their forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvrelay.cluster.config import SHIPPED_MODEL
from kvrelay.errors import Rejected
from kvrelay.text.bad_words import bad_word_ids
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer
from tests.text.kinds import KINDS, write

WORDS = ["fox", " fox", "The", "\n  dog", "quick brown", "漢字", "🎉", "<s>", "x", "a b c", "fox"]


def reference(folder: Path, words: list[str]) -> list[list[int]]:
    """Word by word and form by form, as ``SamplingParams.update_from_tokenizer`` of vLLM 0.32.

    Without its condition that both forms have as many tokens.
    """
    theirs = AutoTokenizer.from_pretrained(str(folder))
    found: list[list[int]] = []
    for word in words:
        for prefix in ("", " "):
            ids = theirs.encode(prefix + word.lstrip(), add_special_tokens=False)
            if not prefix or ids[-len(found[-1]) :] != found[-1]:
                found.append(ids)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_each_word(kind: str, tmp_path: Path) -> None:
    folder = write(kind, tmp_path)
    assert bad_word_ids(Tokenizer(folder), WORDS) == reference(folder, WORDS)


def test_a_word_in_mid_text_has_a_form_of_its_own() -> None:
    ours = Tokenizer(SHIPPED_MODEL)
    plain, spaced = bad_word_ids(ours, ["old"])
    assert (len(plain), len(spaced)) == (3, 1)
    assert [ours.backend.decode(form) for form in (plain, spaced)] == ["old", " old"]


def test_words_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write("byte_level", tmp_path))
    for words, name, told in (
        (["a", " \n"], "sampling.bad_words[1]", r"' \\n' has no token"),
        (["a", ""], "sampling.bad_words[1]", "1 to 256 characters, got 0"),
        (["a"] * 129, "sampling.bad_words", "at most 128, got 129"),
        (["漢" * 256] * 2, "sampling.bad_words", "at most 1024 tokens in all, .*, got "),
    ):
        with pytest.raises(Rejected, match=told) as caught:
            bad_word_ids(tokenizer, words)
        assert caught.value.field == name
    with pytest.raises(Rejected, match=r"needs a tokenizer, .* send bad_word_ids"):
        bad_word_ids(NoTokenizer(), ["a"])
