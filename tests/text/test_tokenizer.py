"""The same ids as ``AutoTokenizer``, and clear errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvrelay.errors import Rejected, Unservable
from kvrelay.text.tokenizer import Tokenizer, eos_token_ids
from tests.text.kinds import CHAT, CORPUS, KINDS, write

TEXTS = [*CORPUS[:4], "", " ", "<s>special</s> <think> é", "\x00\x01", "🎉" * 50, "a" * 10_000]


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_as_transformers(kind: str, tmp_path: Path) -> None:
    ours = Tokenizer(write(kind, tmp_path))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    messages = [{"role": "user", "content": "Where is the fox?"}]
    rendered = theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, return_tensors=None
    )
    assert ours.encode(ours.render(messages), add_special_tokens=False) == rendered
    assert ours.vocab_size == len(theirs)


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
if len(sys.argv) > 1:
    from kvrelay.text.tokenizer import Tokenizer
    Tokenizer(sys.argv[1])
else:
    import transformers
"""


def test_a_router_is_not_told_that_torch_is_missing(tmp_path: Path) -> None:
    """Once ``transformers`` says nothing by itself, the filter in the tokenizer can go."""
    write("byte_level", tmp_path)
    for words in ((), (str(tmp_path),)):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ("PyTorch was not found" in done.stderr) is (not words), done.stderr


def test_too_long(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write("byte_level", tmp_path), max_prompt_bytes=10)
    tokenizer.check_size("é" * 5, "prompt")
    with pytest.raises(Rejected, match="12 bytes") as caught:
        tokenizer.check_size("é" * 6, "prompt")
    assert caught.value.field == "prompt"
    with pytest.raises(Rejected) as caught:
        tokenizer.render([{"role": "user", "content": "x"}, {"role": "user", "content": "x" * 11}])
    assert caught.value.field == "chat.messages[1].content"


def test_chat_errors(tmp_path: Path) -> None:
    write("byte_level", tmp_path)
    with pytest.raises(Rejected, match="empty"):
        Tokenizer(tmp_path).render([])
    refusing = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "chat_template.jinja").write_text(refusing)
    with pytest.raises(Rejected, match="roles must alternate"):
        Tokenizer(tmp_path).render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(Rejected, match="no chat template"):
        Tokenizer(tmp_path).render([{"role": "user", "content": "x"}])
    assert CHAT


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(Unservable, match="no such folder"):
        Tokenizer(tmp_path / "none")
    with pytest.raises(Unservable, match=str(tmp_path)):
        Tokenizer(tmp_path)


def test_eos_token_ids(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert eos_token_ids(tmp_path) == (1, 2)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(Unservable, match="not JSON"):
        eos_token_ids(tmp_path)


def test_loading_does_not_import_torch(tmp_path: Path) -> None:
    write("byte_level", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    values = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(values))
    program = (
        "import sys; from kvrelay.text.tokenizer import Tokenizer; t = Tokenizer(sys.argv[1]);"
        "t.encode(t.render([{'role': 'user', 'content': 'x'}])); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = str(Path(__file__).parents[2])
    assert subprocess.run(command, cwd=root, check=False).returncode == 0
