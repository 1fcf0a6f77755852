"""A model without a tokenizer: token ids go in and out, and what needs text says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from kvrelay import AsyncClient
from kvrelay.errors import Rejected
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from kvrelay.worker.stop_strings import StopCheckers
from tests.router import fakes
from tests.router.fakes import answer, decode_worker, prefill_worker, running
from tests.text.kinds import write

PROMPT = [5, 6, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model for which ``transformers`` makes an empty tokenizer, without a word."""
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_without_a_vocabulary_has_no_tokenizer(folder: Path) -> None:
    assert isinstance(load_tokenizer(folder), NoTokenizer)
    (folder / "tokenizer_config.json").write_text("{}")
    assert isinstance(load_tokenizer(folder), NoTokenizer)
    assert type(load_tokenizer(write("byte_level", folder))) is Tokenizer


async def test_token_ids_go_in_and_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "tokenizer", lambda: load_tokenizer(folder))
    workers = [prefill_worker(), decode_worker()]
    async with running(workers) as router, AsyncClient(router.address) as client:
        done = await client.complete(token_ids=PROMPT, max_tokens=6, seed=3)
        assert done.token_ids == tuple(answer(PROMPT, 6, 3))
        assert (done.text, done.finish_reason) == ("", "length")
        tokens = answer(PROMPT, 6, 3)
        again = await client.complete(
            token_ids=PROMPT, output_token_ids=tokens[:2], max_tokens=6, seed=3
        )
        assert again.token_ids == tuple(tokens[2:])
        with pytest.raises(Rejected, match=r"prompt: needs a tokenizer, .* send token ids"):
            await client.complete(prompt="x")
        with pytest.raises(Rejected, match=r"messages: needs a tokenizer, .* send token ids"):
            await client.complete(messages=[("user", "x")])
        with pytest.raises(Rejected, match=r"stop: needs a tokenizer, .* send stop_token_ids"):
            await client.complete(token_ids=PROMPT, stop="x")
        ended = await client.complete(
            token_ids=PROMPT, max_tokens=6, seed=3, stop_token_ids=[tokens[3]]
        )
        assert ended.token_ids == tuple(tokens[: 1 + tokens.index(tokens[3])])


def test_no_text_is_made_and_no_stop_string_is_taken(folder: Path) -> None:
    text = OutputText(load_tokenizer(folder))
    assert [text.push(token).text for token in PROMPT] == [""] * 3
    assert text.flush() == ""
    with pytest.raises(Rejected, match=r"sampling\.stop: needs a tokenizer"):
        OutputText(load_tokenizer(folder), ["x"])
    assert StopCheckers(folder) is not None
