"""Small tokenizers of every family, made here: folders as ``transformers`` writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, the fox does not.",
    "Größe, Äpfel und Übermut: naïve café façade.",
    "漢字とかな、中文字符。 Привет, мир! 👩‍👩‍👧 🎉",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))  # done",
] * 4
SPECIAL = ["<s>", "</s>"]
CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ name }}assistant:"


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.add_tokens([AddedToken("<think> é", normalized=False)])
    return backend


def _fallback(decoder: decoders.Decoder, prefix: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        CORPUS[:2],
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=["<unk>", *SPECIAL], show_progress=False
        ),
    )
    vocabulary = backend.get_vocab()
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token])]
    tokens[3:3] = bytes_
    backend.model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(backend),
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    backend.add_special_tokens(["<unk>", *SPECIAL])
    backend.decoder = decoder
    return backend


def _merges(backend: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def llama2() -> Tokenizer:
    """As Llama 2 and Mistral 7B: byte fallback, the first space stripped."""
    return _fallback(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        prefix=True,
    )


def gemma() -> Tokenizer:
    """As Gemma: byte fallback, every space kept."""
    return _fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        prefix=False,
    )


def unigram() -> Tokenizer:
    """As T5 and XGLM: unigram with a Metaspace decoder."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200,
            special_tokens=["<unk>", *SPECIAL],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return backend


def word_piece() -> Tokenizer:
    """As BERT and its decoders."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False
        ),
    )
    return backend


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "unigram": unigram,
    "word_piece": word_piece,
}


def write(kind: str, folder: Path) -> Path:
    """Write the tokenizer of this kind into ``folder``."""
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=KINDS[kind](),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(folder))
    return folder
