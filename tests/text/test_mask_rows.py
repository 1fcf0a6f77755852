"""Masks of several outputs at once: the same as one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvrelay.errors import Rejected
from kvrelay.structured import StructuredOutput
from kvrelay.text.structured import GrammarCompiler, TokenGrammar
from kvrelay.text.tokenizer import Tokenizer
from tests.text.grammars import bits, walk
from tests.text.kinds import write

WANTED = (
    StructuredOutput(json_object=True),
    StructuredOutput(regex=r"(\d{1,4}-)?[a-fü]{2,9}( 漢)*"),
    StructuredOutput(regex="(.|..)*a.{60}b"),
    StructuredOutput(grammar='start: "(" start ")" | /[0-9]+/'),
    StructuredOutput(choice=("yes", "yes, but", "漢字 👩")),
)
DEAD_END = StructuredOutput(grammar='start: e\ne: e e e e | e e e | e e | "a" | "b" | ')


@pytest.fixture(scope="module", params=["byte_level", "llama2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    kind = request.param
    return Tokenizer(write(kind, tmp_path_factory.mktemp(kind) / kind))


def rows_of(grammars: Sequence[TokenGrammar], threads: int) -> list[bytes | None]:
    """The mask of each row, ``None`` of those with an error."""
    packed, errors = TokenGrammar.masks(grammars, threads)
    size = len(packed) // len(grammars)
    rows = [bytes(packed[place : place + size]) for place in range(0, len(packed), size)]
    return [row if error is None else None for row, error in zip(rows, errors, strict=True)]


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_in_parallel_have_the_masks_of_rows_alone(model: Tokenizer, threads: int) -> None:
    """64 outputs of all kinds, each at another place of its text."""
    ending = model.backend.token_to_id("</s>")
    assert ending is not None
    compiler, chance = GrammarCompiler(model, (ending,)), random.Random(5)
    together, alone = [], []
    for row in range(64):
        wanted = WANTED[row % len(WANTED)]
        output = walk(compiler.compile(wanted), ending, row, 12)
        output = output[: chance.randint(0, len(output))]
        alone.append(compiler.compile(wanted).allowed(output, 0, len(output)))
        together.append(compiler.compile(wanted))
        together[-1].follow(output, 0, len(output))
    assert rows_of(together, threads) == alone
    assert len(set(alone)) > len(WANTED)


def test_a_row_that_is_too_complex_is_an_error_of_its_own(model: Tokenizer) -> None:
    ending = model.backend.token_to_id("</s>")
    assert ending is not None
    compiler = GrammarCompiler(model, (ending,))
    grammar, chance = compiler.compile(DEAD_END), random.Random(3)
    letters = [model.encode(letter, add_special_tokens=False)[-1] for letter in "ab"]
    good = compiler.compile(WANTED[0])
    expected = compiler.compile(WANTED[0]).allowed((), 0, 0)
    output: list[int] = []
    for _ in range(4000):
        packed, (first, error, last) = TokenGrammar.masks([good, grammar, good_copy(compiler)], 2)
        size = len(packed) // 3
        assert first is last is None
        assert bytes(packed[:size]) == bytes(packed[2 * size :]) == expected
        if error is not None:
            assert isinstance(error, Rejected)
            assert "is too complex, or cannot be continued, after" in str(error)
            return
        allowed = bits(bytes(packed[size : 2 * size]))
        output.append(chance.choice([token for token in letters if token in allowed]))
        try:
            grammar.follow(output, 0, len(output))
        except Rejected:
            continue  # and so has the mask
    raise AssertionError("the grammar was never too complex")


def good_copy(compiler: GrammarCompiler) -> TokenGrammar:
    return compiler.compile(WANTED[0])
