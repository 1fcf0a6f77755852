"""The words that documents, questions and answers are made of; every one is a single token.

The lists are disjoint: a word alone shows whether it is part of a subject, or a value.
"""
# ruff: noqa: SIM905 - a list of words reads best as words

from typing import Final

ADJECTIVES: Final = tuple(
    "silver copper golden wooden marble crimson scarlet amber ivory ebony velvet crystal "
    "painted broken hidden ancient foreign heavy hollow narrow pale quiet rusty sacred "
    "smooth striped tiny twisted purple green blue white".split()
)
NOUNS: Final = tuple(
    "lantern kettle mirror compass violin anchor basket bottle candle carpet clock crown "
    "drum feather flute globe goblet hammer helmet kite ladder locket mask medal necklace "
    "needle piano saddle statue sundial trumpet vase".split()
)
NAMES: Final = tuple(
    "Mira Tomas Ingrid Pavel Leila Oscar Hana Bruno Celia Darius Elena Felix Greta Hugo "
    "Irena Jonas Karin Luca Marta Nadia Olga Pedro Quentin Rosa Stefan Tessa Ulrich Vera "
    "Wanda Xavier Yusuf Zora Amina Boris Clara Dmitri Edith Frida Gustav Helga".split()
)
PLACES: Final = tuple(
    "Oslo Lima Cairo Kyoto Quito Dakar Delhi Hanoi Milan Paris Porto Prague Riga Seoul "
    "Sofia Tokyo Tunis Turin Vienna Warsaw Zagreb Athens Berlin Boston Bergen Dublin Geneva "
    "Havana Lagos Lisbon London Madrid Moscow Nairobi Rome Sydney Tampa Toronto Venice "
    "Zurich".split()
)
YEARS: Final = tuple(str(year) for year in range(1840, 1880))

TITLES: Final = (
    "Register of the old museum.",
    "Notes on the collection.",
    "An inventory, copied by hand.",
    "What the house on the hill contains.",
)
ASIDES: Final = (
    "It rained all week.",
    "Nobody knows why.",
    "So the letters say.",
    "There is no record of this.",
    "All of this was checked twice.",
)
