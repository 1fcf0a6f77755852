"""The tokenizer: byte-level, so that any text survives it, with each word of the task one token.

`python -m benchmarks.recall.tokenizer DIR` writes it. It needs no training: the vocabulary is the
256 bytes, then the words, looked up whole before any merge (`ignore_merges`), as in Llama 3.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvrelay.recall import words
from kvrelay.recall.facts import WORDINGS
from kvrelay.recall.prompt import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIAL, UNKNOWN

MAX_LENGTH = 4096


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, made from the word lists alone."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [piece for piece in dict.fromkeys(_words()) if len(piece) > 1]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def token(tokenizer: PreTrainedTokenizerFast, piece: str) -> int:
    """The id of one piece of the vocabulary."""
    return tokenizer.get_vocab()[piece]


def save(folder: Path) -> None:
    """Write the tokenizer's files, under the class name that older `transformers` know too."""
    build().save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _words() -> Iterator[str]:
    """Every piece that the byte-level splitter can cut out of the task's text."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in _texts():
        yield from (piece for piece, _ in split.pre_tokenize_str(text))


def _texts() -> Iterator[str]:
    yield from words.TITLES
    yield "The The"
    for values in (words.ADJECTIVES, words.NOUNS, words.NAMES, words.PLACES, words.YEARS):
        yield from (f" {value}" for value in values)
    yield from (f" {aside}" for aside in words.ASIDES)
    for wording in WORDINGS.values():
        yield from (f" {stated}" for stated in wording.stated)
        yield from (asked.format("") for asked in wording.asked)


def main() -> None:
    """Write the tokenizer's files into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    save(parser.parse_args().folder)


if __name__ == "__main__":
    main()
