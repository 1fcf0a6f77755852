"""Training of the weights: the targets, and what the construction already finds."""

from itertools import islice
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.recall.batches import TURNS, DocumentLengths, batches
from benchmarks.recall.construct import construct
from benchmarks.recall.evaluate import UNSEEN
from benchmarks.recall.tokenizer import build, token
from benchmarks.recall.train import loss, rate
from kvrelay.recall.facts import document, question
from kvrelay.recall.prompt import ASSISTANT, END, PAD, prompt


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build()


def test_the_answers_are_the_targets(tokenizer: PreTrainedTokenizerFast) -> None:
    print("seed 3")
    lengths = DocumentLengths(fewest=TURNS, most=40, budget=2000)
    for batch in islice(batches(tokenizer, Random(3), lengths), 5):
        assert bool((batch.weights[batch.ids == token(tokenizer, PAD)] == 0).all())
        for ids, weights in zip(batch.ids, batch.weights, strict=True):
            turns = str(tokenizer.decode(ids)).split(ASSISTANT)[1:]
            answers = [turn[: turn.index(END)] + END for turn in turns]
            assert len(answers) == TURNS
            assert tokenizer.decode(ids[weights == 1]) == "".join(answers)


def test_the_construction_finds_values_before_any_training(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    print(f"seed 0, document {UNSEEN}")
    model = construct(tokenizer, seed=0)
    made = document(UNSEEN, facts=60)
    found = []
    for asked in (question(fact) for fact in made.facts[::4]):
        said = asked.answer.removesuffix(f" {asked.value}.")
        ids = tokenizer(prompt(made, asked) + said)["input_ids"]
        with torch.inference_mode():
            best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        found.append(tokenizer.decode([best]) == f" {asked.value}")
    assert sum(found) >= 0.9 * len(found)


def test_a_step_has_a_gradient(tokenizer: PreTrainedTokenizerFast) -> None:
    model = construct(tokenizer, seed=0)
    lengths = DocumentLengths(fewest=4, most=8, budget=500)
    mean, correct = loss(model, next(batches(tokenizer, Random(0), lengths)))
    torch.autograd.backward(mean)
    assert 0 <= correct < 1
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_rate_rises_and_falls() -> None:
    rates = [rate(step, 1000) for step in range(1001)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0)
