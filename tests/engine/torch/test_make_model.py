"""Models of random weights: what is written loads, runs, and speaks text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.random_model import SHAPES, byte_tokenizer, make_model
from kvrelay.engine.model.loading import load_model
from kvrelay.engine.runner import Runner
from kvrelay.errors import Rejected
from tests.engine.torch.drive import Oracle, generate, prompts


@pytest.mark.parametrize("shape", ["llama-tiny", "qwen3-tiny", "llama-toy"])
def test_written_model_loads_and_runs(tmp_path: Path, shape: str) -> None:
    path = make_model(shape, tmp_path / shape, "float32", seed=3)
    loaded, sizes = load_model(path), SHAPES[shape]
    assert (loaded.info.num_layers, loaded.info.head_dim) == (
        sizes.num_hidden_layers,
        sizes.head_dim,
    )
    asked = prompts(3, [5, 40], sizes.vocab_size)
    got = generate(Runner(loaded, 40, 4), asked, 6, chunk=11)
    oracle = Oracle(path)
    assert [s.tokens[s.prompt_len :] for s in got] == [oracle.generate(p, 6) for p in asked]


def test_seed_and_dtype(tmp_path: Path) -> None:
    make = [make_model("llama-tiny", tmp_path / str(i), "float32", seed=i // 2) for i in range(3)]
    revisions = [load_model(path).info.revision for path in make]
    assert revisions[0] == revisions[1] != revisions[2]
    assert load_model(make_model("llama-tiny", tmp_path / "h")).info.dtype == "bfloat16"


def test_any_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    make_model("llama-tiny", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("plain", " spaces  and\nlines", "żółw 漢字 🙂", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_every_id_has_a_text_of_its_own() -> None:
    tokenizer = byte_tokenizer(3000)
    assert tokenizer.get_vocab_size() == 3000
    assert len({tokenizer.id_to_token(token) for token in range(3000)}) == 3000


def test_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"shape: 'gpt-9' is not one of qwen3-0\.6b"):
        make_model("gpt-9", tmp_path)
    with pytest.raises(Rejected, match="dtype: 'int8'"):
        make_model("llama-tiny", tmp_path, "int8")
