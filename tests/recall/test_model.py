"""The stored weights: they recall facts anywhere in a document, and only from that document."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.recall.evaluate import MODEL, UNSEEN, evaluate, generate, load, remember
from kvrelay.recall.facts import WORDINGS, Document, FactQuestion, document, question
from kvrelay.recall.prompt import END, messages, prompt

Loaded = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(MODEL, "float32")


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 4_000_000


@pytest.mark.parametrize("tokens", [100, 1000])
def test_questions_are_answered_to_the_letter(loaded: Loaded, tokens: int) -> None:
    print(f"first seed {UNSEEN}")
    score = evaluate(*loaded, questions=20, tokens=tokens)
    assert score.accuracy >= 0.95, score.lines()


def test_a_chat_is_answered_without_any_help(loaded: Loaded) -> None:
    made = document(UNSEEN, facts=30)
    asked = question(made.facts[4])
    assert say(loaded, messages(made, asked)) == asked.answer + END


def test_earlier_turns_do_no_harm(loaded: Loaded) -> None:
    made = document(UNSEEN + 1, facts=30)
    first, second = question(made.facts[3]), question(made.facts[20], form=1)
    chat = [
        *messages(made, first),
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.text},
    ]
    assert say(loaded, chat) == second.answer + END


def test_a_document_may_stand_in_the_question(loaded: Loaded) -> None:
    made = document(UNSEEN + 2, facts=30)
    asked = question(made.facts[25])
    chat = [{"role": "user", "content": f"{made.text}\n{asked.text}"}]
    assert say(loaded, chat) == asked.answer + END


def test_the_answer_is_what_the_kv_says(loaded: Loaded) -> None:
    """Under prompts of one document and the KV of another, the KV decides."""
    made = document(UNSEEN, facts=60)
    shared = remember(*loaded, lie(made))
    questions = [question(fact) for fact in made.facts[::6]]
    said = [answer_on(loaded, shared, made, each) for each in questions]
    lied = [question(fact).answer + END for fact in lie(made).facts[::6]]
    assert not [each for each in questions if each.answer + END in said]
    assert sum(map(str.__eq__, said, lied)) >= 0.95 * len(lied)


def lie(made: Document) -> Document:
    """The same document, token for token, but with the next value of its kind in every fact."""
    facts, text = [], made.text
    for fact in made.facts:
        values = WORDINGS[fact.kind].values
        wrong = values[(values.index(fact.value) + 1) % len(values)]
        facts.append(replace(fact, value=wrong))
        for form in range(len(WORDINGS[fact.kind].stated)):
            text = text.replace(fact.sentence(form), facts[-1].sentence(form))
    return Document(text, tuple(facts))


def answer_on(loaded: Loaded, shared: DynamicCache, made: Document, asked: FactQuestion) -> str:
    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(prompt(made, asked))["input_ids"]])
    return generate(model, tokenizer, shared, ids)[0]


def say(loaded: Loaded, chat: list[dict[str, str]]) -> str:
    """The continuation of a chat by plain `generate`."""
    model, tokenizer = loaded
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str)
    ids = torch.tensor([tokenizer(rendered)["input_ids"]])
    generate = cast(Callable[..., torch.Tensor], model.generate)  # not typed before 5.24
    output = generate(ids, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(output[0, ids.shape[1] :])
    assert isinstance(text, str)
    return text
