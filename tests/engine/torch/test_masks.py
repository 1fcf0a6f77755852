"""The masks of structured output behind the sampler: endings, dead ends, log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.sampling.masks import MaskThread
from kvrelay.engine.sampling.sampler import sample
from kvrelay.errors import KvrelayError, Rejected
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput

VOCAB = 45  # not a multiple of eight
EOS = 44
STOP = 7
WANTED = StructuredOutput(regex="x")
GREEDY = Sampling(temperature=0.0, eos_token_ids=(EOS,), structured_output=WANTED)


@dataclass
class Allows:
    """A grammar that allows the same tokens everywhere, of a vocabulary of its own size."""

    tokens: Sequence[int]
    size: int = VOCAB
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def follow(self, tokens: Sequence[int], first: int, last: int) -> None:
        self.asked.append(tuple(tokens[first:last]))

    @classmethod
    def masks(
        cls, grammars: Sequence[Allows], threads: int
    ) -> tuple[bytes, list[KvrelayError | None]]:
        rows = [grammar.row() for grammar in grammars]
        return b"".join(rows), [None] * len(grammars)

    def row(self) -> bytes:
        packed = bytearray(-(-self.size // 32) * 4)
        for token in self.tokens:
            packed[token // 8] |= 1 << token % 8
        return bytes(packed)


class Fails:
    """A grammar that output cannot follow, or with ``late`` one that has no mask."""

    def __init__(self, late: bool = False) -> None:
        self.late = late

    def follow(self, tokens: Sequence[int], first: int, last: int) -> None:
        if not self.late:
            raise Rejected("sampling.structured_output.regex", "is too complex")

    @classmethod
    def masks(
        cls, grammars: Sequence[Fails], threads: int
    ) -> tuple[bytes, list[KvrelayError | None]]:
        error = Rejected("sampling.structured_output.regex", "is too complex")
        return bytes(8 * len(grammars)), [error] * len(grammars)


def work(
    sampling: Sampling, grammar: Allows | Fails | None, tokens: Sequence[int] = (1, 2, 3)
) -> Work:
    """A work with a prompt of two tokens, whose sample stands after all its tokens."""
    return Work(tokens, len(tokens) - 1, 1, [0] * len(tokens), 2, sampling, grammar)


def run(works: Sequence[Work], logits: torch.Tensor | None = None) -> list[Sampled]:
    if logits is None:
        logits = torch.arange(VOCAB, dtype=torch.float32).repeat(len(works), 1)
    with MaskThread(VOCAB).computing(works) as masks:
        return sample(logits, works, masks())


def test_only_allowed_tokens_are_sampled() -> None:
    grammar = Allows([3, 9, 12])
    assert run([work(GREEDY, grammar)])[0].token == 12
    assert grammar.asked == [(3,)]  # the output alone
    drawn = {
        run([work(replace(GREEDY, temperature=50.0, seed=seed), grammar)])[0].token
        for seed in range(60)
    }
    assert drawn == {3, 9, 12}


@pytest.mark.parametrize("size", [32, 40, 64, 160])
def test_the_vocabulary_may_be_smaller_or_larger_than_the_logits(size: int) -> None:
    assert run([work(GREEDY, Allows([3, size - 1], size))])[0].token == (
        size - 1 if size <= VOCAB else 3
    )


def test_rows_without_a_grammar_are_as_they_were() -> None:
    plain = Sampling(temperature=0.7, seed=5, logprobs=2)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    free = run([work(plain, None)] * 4, logits)
    mixed = run(
        [
            work(plain, None),
            work(GREEDY, Allows([1])),
            work(plain, None),
            work(GREEDY, Allows([2])),
        ],
        logits,
    )
    assert [mixed[0], mixed[2]] == [free[0], free[2]]
    assert [mixed[1].token, mixed[3].token] == [1, 2]


def test_no_thread_and_no_mask_without_a_grammar() -> None:
    masks = MaskThread(VOCAB)
    with masks.computing([work(GREEDY, None)]) as pending:
        assert pending() is None
    unsampled = replace(work(GREEDY, Allows([1])), sampling=None)
    with masks.computing([unsampled]) as pending:
        assert pending() is None


def test_the_thread_is_done_with_the_works_when_a_step_fails() -> None:
    grammar = Allows([1])
    with (
        pytest.raises(ValueError, match="forward"),
        MaskThread(VOCAB).computing([work(GREEDY, grammar)]),
    ):
        raise ValueError("forward")
    assert len(grammar.asked) == 1


@pytest.mark.parametrize(
    ("changed", "allowed", "token"),
    [
        ({}, [3, EOS], EOS),
        ({"min_tokens": 2}, [3, EOS], 3),
        ({"min_tokens": 1}, [3, EOS], EOS),
        ({"min_tokens": 9}, [EOS], EOS),  # nothing else can follow
        ({"ignore_eos": True}, [3, EOS], 3),
        ({"ignore_eos": True}, [EOS], EOS),
        ({"min_tokens": 2, "stop_token_ids": (STOP,)}, [3, STOP], 3),
        ({"ignore_eos": True, "stop_token_ids": (STOP,)}, [3, STOP, EOS], STOP),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, [3, EOS], EOS),
    ],
)
def test_endings(changed: dict[str, object], allowed: list[int], token: int) -> None:
    sampling = replace(GREEDY, **changed)  # type: ignore[arg-type]
    made = run([work(sampling, Allows(allowed))])[0]
    assert (made.token, made.error) == (token, None)
    assert token == 3 or token in sampling.ending_token_ids


def test_log_probabilities_are_of_the_masked_logits() -> None:
    sampling = replace(GREEDY, logprobs=4)
    made = run([work(sampling, Allows([3, 5]))])[0]
    total = math.log(math.exp(3) + math.exp(5))
    assert made.token == 5
    assert made.logprob == pytest.approx(5 - total, abs=1e-5)
    assert [(one.token, round(one.logprob, 4)) for one in made.top] == [
        (5, round(5 - total, 4)),
        (3, round(3 - total, 4)),
    ]  # and no token that is impossible


def test_biases_and_penalties_choose_among_the_allowed() -> None:
    biased = replace(GREEDY, logit_bias={3: 100.0, 40: 100.0})
    assert run([work(biased, Allows([3, 5]))])[0].token == 3
    repeated = replace(GREEDY, repetition_penalty=9.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert run([work(repeated, Allows([3, 2]), (1, 2, 3))])[0].token in (2, 3)
    assert run([work(repeated, Allows([4, 3]), (1, 2, 3, 3))])[0].token == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_end_is_an_error_of_its_row_alone(temperature: float) -> None:
    sampling = replace(GREEDY, temperature=temperature, seed=1, logprobs=3, top_p=0.9, top_k=5)
    dead = replace(sampling, bad_word_ids=((3,),))
    made = run(
        [
            work(sampling, Allows([3])),
            work(dead, Allows([3])),
            work(sampling, Fails()),
            work(sampling, None),
            work(sampling, Fails(late=True)),
        ]
    )
    assert made[0].token == 3
    assert made[0].error is None
    assert isinstance(made[1].error, Rejected)
    assert "bad_words" in str(made[1].error)
    assert "is too complex" in str(made[2].error)
    assert made[3].error is None
    assert 0 <= made[3].token < VOCAB
    assert "is too complex" in str(made[4].error)
