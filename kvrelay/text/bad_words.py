"""Bad words as token ids: those of vLLM's ``SamplingParams.update_from_tokenizer``, and more.

vLLM leaves out the form after a space if it has another number of tokens than the other form, and
so lets through a word whose only single token begins with a space.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.errors import Rejected
from kvrelay.sampling import MAX_BAD_WORD_TOKENS, check_bad_words
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token sequences of each word as it begins a text and as it follows a space.

    Raises ``Rejected`` naming the word that cannot be used.
    """
    check_bad_words(words)
    if isinstance(tokenizer, NoTokenizer):
        raise tokenizer.refusal("sampling.bad_words")
    stripped = [word.lstrip() for word in words]
    forms = tokenizer.encode_all([*stripped, *(f" {word}" for word in stripped)])
    found: list[list[int]] = []
    for index, (plain, spaced) in enumerate(
        zip(forms[: len(words)], forms[len(words) :], strict=True)
    ):
        if not plain:
            raise Rejected(f"sampling.bad_words[{index}]", f"{words[index]!r} has no token")
        found.append(plain)
        if spaced[-len(plain) :] != plain:  # else the first form forbids it too
            found.append(spaced)
    if (total := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
        raise Rejected(
            "sampling.bad_words",
            f"at most {MAX_BAD_WORD_TOKENS} tokens in all, those of both forms of each word,"
            f" got {total}",
        )
    return found
