"""Training batches: documents of mixed length, each followed by many questions and their answers.

Every token is a target, but those of an answer weigh most: what a document says next is chance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.recall.tokenizer import token
from kvrelay.recall.facts import TOKENS_PER_FACT, Document, FactQuestion, document, question
from kvrelay.recall.prompt import ASSISTANT, BEGIN, END, PAD, USER, prefix, turn

TURNS: Final = 16
TOKENS_PER_TURN: Final = 20
OTHER_WEIGHT: Final = 0.02
PASTED: Final = 0.15
"""How often the document stands in the first question's message instead of the system's."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """`ids` and `weights` are `[sequence, token]`; a weight belongs to the token as a target."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """The range of a document's facts, and how many tokens one batch may hold."""

    fewest: int
    most: int
    budget: int


def batches(
    tokenizer: PreTrainedTokenizerFast, random: Random, lengths: DocumentLengths
) -> Iterator[TrainingBatch]:
    """Fresh batches without end; the number of facts is drawn evenly over its logarithm."""
    low, high = math.log(lengths.fewest), math.log(lengths.most)
    while True:
        facts = round(math.exp(random.uniform(low, high)))
        each = facts * TOKENS_PER_FACT + TURNS * TOKENS_PER_TURN
        texts = [_conversation(random, facts) for _ in range(max(1, round(lengths.budget / each)))]
        yield _batch(tokenizer, [tokenizer(text)["input_ids"] for text in texts])


def _conversation(random: Random, facts: int) -> str:
    made = document(random.getrandbits(31), facts)
    chosen = random.sample(made.facts, min(TURNS, facts))
    asked = [question(fact, random.getrandbits(4)) for fact in chosen]
    turns = [f"{turn(each)}{each.answer}{END}" for each in asked]
    if random.random() < PASTED:
        return _pasted(made, asked[0]) + "".join(turns[1:])
    return prefix(made) + "".join(turns)


def _pasted(made: Document, asked: FactQuestion) -> str:
    return f"{BEGIN}{USER}{made.text}\n{asked.text}{END}{ASSISTANT}{asked.answer}{END}"


def _batch(tokenizer: PreTrainedTokenizerFast, sequences: list[list[int]]) -> TrainingBatch:
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), token(tokenizer, PAD))
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    answers = _answers(ids, token(tokenizer, ASSISTANT), token(tokenizer, END))
    weights = torch.where(answers, 1.0, OTHER_WEIGHT)
    return TrainingBatch(ids, weights * (ids != token(tokenizer, PAD)))


def _answers(ids: Tensor, begin: int, end: int) -> Tensor:
    """Where a token lies after an `ASSISTANT`, up to and with the next `END`: a boolean mask."""
    position = torch.arange(ids.shape[1]).expand_as(ids)
    opened = torch.where(ids == begin, position, -1).cummax(1).values
    closed = torch.where(ids == end, position, -1).cummax(1).values
    before = torch.nn.functional.pad(closed, (1, 0), value=-1)[:, :-1]
    return (opened > before) & (position > opened)
