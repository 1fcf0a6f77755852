"""The text of the recall task: seeded, well posed, lossless in tokens, one prefix per document."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.recall.tokenizer import build, save
from kvrelay import recall
from kvrelay.recall import words
from kvrelay.recall.facts import WORDINGS, document, facts_for, question
from kvrelay.recall.prompt import END, messages, prefix, prompt

MODEL = Path(recall.__file__).parent / "model"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODEL)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def test_a_document_is_its_seed() -> None:
    assert document(7, facts=30) == document(7, facts=30)
    assert document(7, facts=30) != document(8, facts=30)


@pytest.mark.parametrize("facts", [0, -1, 3073])
def test_a_document_of_impossible_size_is_refused(facts: int) -> None:
    with pytest.raises(ValueError, match="facts must be in"):
        document(1, facts=facts)


def test_every_question_has_one_answer() -> None:
    stated = document(3, facts=300).facts
    assert len({(fact.kind, fact.subject) for fact in stated}) == len(stated)


def test_every_fact_is_in_the_text_in_order() -> None:
    made = document(3, facts=100)
    at = 0
    for fact in made.facts:
        forms = [fact.sentence(form) for form in range(len(WORDINGS[fact.kind].stated))]
        at = min(found for found in (made.text.find(form, at) for form in forms) if found >= 0)
    assert question(made.facts[0]).answer.endswith(f" {made.facts[0].value}.")


def test_a_word_is_of_one_sort_and_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    sorts = (words.ADJECTIVES, words.NOUNS, words.NAMES, words.PLACES, words.YEARS)
    everything = [word for sort in sorts for word in sort]
    assert len(set(everything)) == len(everything)
    assert all(len(encode(tokenizer, f" {word}")) == 1 for word in everything)


@pytest.mark.parametrize("tokens", [500, 1000, 2000])
def test_length_is_as_asked(tokenizer: PreTrainedTokenizerFast, tokens: int) -> None:
    lengths = [
        len(encode(tokenizer, prefix(document(seed, facts_for(tokens))))) for seed in range(5)
    ]
    assert all(0.9 * tokens < length < 1.1 * tokens for length in lengths), lengths


@pytest.mark.parametrize("form", [0, 1])
def test_a_document_is_a_prefix_of_all_its_prompts(
    tokenizer: PreTrainedTokenizerFast, form: int
) -> None:
    made = document(5, facts=40)
    shared = encode(tokenizer, prefix(made))
    for fact in made.facts:
        ids = encode(tokenizer, prompt(made, question(fact, form)))
        assert ids[: len(shared)] == shared
        assert tokenizer.unk_token_id not in ids


def test_the_chat_template_renders_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    made = document(5, facts=40)
    asked = question(made.facts[9])
    rendered = tokenizer.apply_chat_template(
        messages(made, asked), tokenize=False, add_generation_prompt=True
    )
    assert rendered == prompt(made, asked)
    answered = [*messages(made, asked), {"role": "assistant", "content": asked.answer}]
    rendered = tokenizer.apply_chat_template(answered, tokenize=False)
    assert rendered == prompt(made, asked) + asked.answer + END


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The silver lantern belongs to Mira.",
        " two  spaces, a\ttab \r\n\n and a trailing one ",
        "don't . stop , 's",
        "na\u00efve \u65e5\u672c\u8a9e \U0001f642\u200d\U0001f680 \u2581 \u0120 \x00\x7f",
        "<|end|> <s><|user|>",
    ],
)
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_the_stored_tokenizer_is_the_one_built(tmp_path: Path) -> None:
    save(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text("utf-8") == (MODEL / file.name).read_text("utf-8"), file.name
    assert build().eos_token == END
