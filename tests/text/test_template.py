"""Arguments of the chat template: passed as they are, bounded, without those of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from kvrelay.text.tokenizer import Tokenizer
from tests.text.kinds import write

TURNS = [{"role": "user", "content": "x"}]
TEMPLATE = (
    "{{ messages[0].content }}|{{ thinking }}|{{ level + 1 if level is defined }}|{{ bos_token }}"
    "|{{ names | join(',') }}|{{ add_generation_prompt }}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = write("byte_level", tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def test_arguments_reach_the_template_with_their_types(tokenizer: Tokenizer) -> None:
    plain = tokenizer.render(TURNS)
    given = {"thinking": False, "level": 2, "names": ["a", "b"], "unused": None}
    assert tokenizer.render(TURNS, json.dumps(given)) == plain.replace(
        "x|||", "x|False|3|"
    ).replace("||True", "|a,b|True")
    assert tokenizer.render(TURNS, json.dumps({"level": 2.5})).startswith("x||3.5|")
    assert tokenizer.render(TURNS, "{}") == plain


@pytest.mark.parametrize(
    "name",
    [
        *("add_generation_prompt", "tokenize", "chat_template", "continue_final_message"),
        *("messages", "conversation", "tools", "documents", "self", "bos_token"),
        *("raise_exception", "namespace"),
    ],
)
def test_our_own_names_are_refused(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(Rejected, match="is set by this server") as caught:
        tokenizer.render(TURNS, json.dumps({"fine": 1, name: "x"}))
    assert caught.value.field == f"chat.template_kwargs.{name}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", None),
        (" ", "is not JSON"),
        ("null", "must be a JSON object, got 'null'"),
        ('{"a": Infinity}', "Infinity is no JSON number"),
        ('{"a": "' + "x" * 16384 + '"}', "at most 16384 bytes of JSON, got 16393"),
        ('{"a":' * 16 + "1" + "}" * 16, None),
        ('{"a":' * 17 + "1" + "}" * 17, "at most 16 levels deep, got 17"),
        ("[" * 8000, "levels deep|not JSON"),
        ('{"level": "x"}', "the chat template refuses it"),
        ('{"level": {"a": 1}}', "the chat template refuses it"),
        ('{"names": 5}', "the chat template refuses it"),
    ],
)
def test_bounds(text: str, told: str | None, tokenizer: Tokenizer) -> None:
    if told is None:
        tokenizer.render(TURNS, text)
        return
    with pytest.raises(Rejected, match=told) as caught:
        tokenizer.render(TURNS, text)
    assert caught.value.field.startswith("chat")
