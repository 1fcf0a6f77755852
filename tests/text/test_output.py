"""Streaming equals decoding at once; stop strings do not depend on splits; replay."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.text.detokenizer import ByteLevelDetokenizer, detokenizer
from kvrelay.text.output import OutputText
from kvrelay.text.stop import StopStrings
from kvrelay.text.tokenizer import Tokenizer
from tests.text.kinds import CORPUS, KINDS, write


@cache
def tokenizer(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer(write(kind, Path(folder)))


def streamed(kind: str, tokens: list[int]) -> str:
    stream = detokenizer(tokenizer(kind))
    pieces = [stream.push(token) for token in tokens]
    if kind == "byte_level" and "\ufffd" not in tokenizer(kind).decode(tokens):
        assert not any("\ufffd" in piece for piece in pieces)
    return "".join(pieces) + stream.flush()


TEXT = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab ▁é漢👩‍👧\n\ufffd<>s/", max_size=60),
    st.sampled_from(CORPUS),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(text=TEXT)
def test_any_text_streams_to_itself(kind: str, text: str) -> None:
    tokens = tokenizer(kind).encode(text)
    assert streamed(kind, tokens) == tokenizer(kind).decode(tokens)


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "word_piece"])
def test_any_tokens_stream_to_their_text(kind: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = tokenizer(kind).vocab_size
    for _ in range(1000):
        tokens = [rng.randrange(size + 3) for _ in range(rng.randrange(30))]
        assert streamed(kind, tokens) == tokenizer(kind).decode(tokens)


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
def test_random_tokens_without_raw_bytes(kind: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = tokenizer(kind).vocab_size
    for _ in range(1000):
        tokens = [rng.choice([1, 2, *range(259, size)]) for _ in range(rng.randrange(30))]
        assert streamed(kind, tokens) == tokenizer(kind).decode(tokens)


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
def test_bytes_that_are_no_utf8_stream_as_replacements(kind: str) -> None:
    size = tokenizer(kind).vocab_size
    bytes_ = [3 + byte for byte in (*"漢".encode(), 0xFF, 0xE6)]
    text = streamed(kind, [*bytes_, size - 1])
    assert text.startswith("漢\ufffd\ufffd")
    stream = detokenizer(tokenizer(kind))
    assert all(len(stream.push(3 + 0x80)) <= 4 for _ in range(100))


def test_families() -> None:
    assert isinstance(detokenizer(tokenizer("byte_level")), ByteLevelDetokenizer)
    assert not isinstance(detokenizer(tokenizer("llama2")), ByteLevelDetokenizer)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The expected text, found one character at a time."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=STOPS,
)
def test_stops_do_not_depend_on_the_cut(pieces: list[str], stops: list[str]) -> None:
    stream, shown, stopped = StopStrings(stops), "", False
    for piece in pieces:
        text, stopped = stream.push(piece)
        shown += text
        assert all(len(stream._held) < len(stop) for stop in stops[:1] if len(stops) == 1)
        if stopped:
            break
    if not stopped:
        shown += stream.flush()
    expected = reference("".join(pieces), stops)
    assert (shown, stopped) == expected


def test_only_a_beginning_is_held_back() -> None:
    stream = StopStrings(["END", "xx"])
    assert stream.push("abcE") == ("abc", False)
    assert stream.push("Nx") == ("EN", False)
    assert stream.push("y") == ("xy", False)
    assert stream.push("x") == ("", False)
    assert stream.push("xz") == ("", True)


def run(tokens: list[int], stops: list[str], min_tokens: int, resume_at: int) -> tuple[str, int]:
    """Text and number of tokens used, with a new object after ``resume_at`` tokens."""
    output = OutputText(tokenizer("byte_level"), stops, min_tokens)
    shown = ""
    for count, token in enumerate(tokens):
        if count == resume_at:
            output = OutputText(tokenizer("byte_level"), stops, min_tokens)
            assert not output.replay(tokens[:count])
        piece = output.push(token)
        shown += piece.text
        if piece.stopped:
            return shown, count + 1
    return shown + output.flush(), len(tokens)


@pytest.mark.parametrize("stop", ["fox jumps", "漢字", "👩‍👧", "does n", ".", "nothing"])
def test_a_resume_at_every_token_is_exact(stop: str) -> None:
    text = "".join(dict.fromkeys(CORPUS)) + "👩‍👧."
    tokens = tokenizer("byte_level").encode(text)
    whole = run(tokens, [stop], 0, -1)
    assert whole[0] == (text[: text.index(stop)] if stop in text else text)
    for at in range(whole[1]):
        assert run(tokens, [stop], 0, at) == whole


def test_min_tokens_disarms_stop_strings() -> None:
    tokens = tokenizer("byte_level").encode("a.b.c.d")
    assert len(tokens) == 7
    assert run(tokens, ["."], 0, -1) == ("a", 2)
    assert run(tokens, ["."], 1, -1) == ("a", 2)
    assert run(tokens, ["."], 2, -1) == ("a.b", 4)
    assert run(tokens, ["b.c"], 4, -1) == ("a.", 5)
    assert run(tokens, ["."], 7, -1) == ("a.b.c.d", 7)
