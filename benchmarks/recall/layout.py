"""The layout of the constructed model's residual stream: what each coordinate holds.

Sorts of words are coordinates of their own, so that attention can ask for "the nearest noun".
"""

from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerFast

from kvrelay.recall import words

HIDDEN: Final = 128
CODE: Final = 24

SORTS: Final[dict[str, tuple[str, ...]]] = {
    "adjective": words.ADJECTIVES,
    "noun": words.NOUNS,
    "name": words.NAMES,
    "place": words.PLACES,
    "year": words.YEARS,
    "the": ("the", "The"),
    "to": ("to",),
    "in": ("in",),
    "around": ("around",),
    "who": ("who", "Who"),
    "where": ("Where",),
    "when": ("When", "How"),
}
"""Words by the part they play; each sort is a coordinate of the embedding."""
VALUES: Final = ("name", "place", "year")
FOLLOWS: Final = (
    ("the", "adjective"),
    ("adjective", "noun"),
    ("to", "name"),
    ("in", "place"),
    ("around", "year"),
)
"""After a word of the first sort comes one of the second."""


@dataclass(frozen=True, slots=True)
class ResidualLayout:
    """Which coordinates of the residual stream hold what."""

    one: int = 0
    sort: int = 1
    word: int = 14
    adjective: int = word + CODE
    noun: int = adjective + CODE
    asked: int = noun + CODE
    previous: int = asked + len(VALUES)
    found: int = previous + 12


AT: Final = ResidualLayout()
OTHER: Final = AT.sort + len(SORTS)
"""The sort of all other tokens, so that every embedding has the same length."""


def coordinate(sort: str) -> int:
    """Where the residual stream says that the token is of this sort."""
    return AT.sort + list(SORTS).index(sort)


def sorts_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """The token ids of each sort, with and without the leading space."""
    vocabulary = tokenizer.get_vocab()
    return {
        sort: [
            vocabulary[piece]
            for word in members
            for piece in (word, f"\u0120{word}")
            if piece in vocabulary
        ]
        for sort, members in SORTS.items()
    }
