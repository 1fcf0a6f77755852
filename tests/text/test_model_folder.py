"""Folders that hold no model in a form that is served: each with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.errors import Unservable
from kvrelay.model_folder import check_model_folder, folder_reasons
from kvrelay.text.tokenizer import Tokenizer


def files(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        return folder

    return make


def pointer(folder: Path) -> Path:
    files("config.json")(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid 1")
    return folder


def shards(folder: Path) -> Path:
    files("config.json", "model-1.safetensors")(folder)
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    index = json.dumps({"weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def gguf(folder: Path) -> Path:
    path = folder / "llama-q4.gguf"
    path.touch()
    return path


FOLDERS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "absent": (lambda folder: folder / "none", ("no such folder", "config.json")),
    "gguf file": (gguf, ("GGUF files are not served", "download the original model")),
    "gguf folder": (files("model-q4.gguf"), ("GGUF", "download the original model")),
    "gguf with config": (files("config.json", "m.gguf"), ("no *.safetensors", "GGUF")),
    "file": (lambda folder: files("a.txt")(folder) / "a.txt", ("is no folder",)),
    "empty": (lambda folder: folder, ("no config.json in it",)),
    "bin": (
        files("config.json", "pytorch_model.bin"),
        ("no *.safetensors", "pickles", "save_pretrained"),
    ),
    "no weights": (files("config.json"), ("no *.safetensors", "is the download complete?")),
    "adapter": (files("adapter_config.json", "adapter_model.safetensors"), ("LoRA", "merge")),
    "adapter and config": (
        files("config.json", "adapter_config.json", "adapter_model.safetensors"),
        ("a LoRA adapter without the weights of its model",),
    ),
    "adapter beside a model": (
        files("config.json", "model.safetensors", "adapter_config.json"),
        ("would be ignored", "merge_and_unload", "take the adapter's files out"),
    ),
    "pointer": (pointer, ("model.safetensors is a Git LFS pointer", "git lfs pull")),
    "shards": (shards, ("2 of the weight files", "model-2.safetensors for one")),
    "original": (files("params.json", "consolidated.safetensors"), ("Hugging Face form",)),
    "cache": (files("snapshots/abc/config.json"), ("Hugging Face cache", "snapshots/abc")),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_wrong_with_a_folder_and_what_to_do(tmp_path: Path, case: str) -> None:
    make, told = FOLDERS[case]
    path = make(tmp_path)
    (reason,) = folder_reasons(path)
    assert all(words in reason for words in told), reason
    with pytest.raises(Unservable, match=re.escape(f"{path}: {reason}")):
        check_model_folder(path)


def test_a_folder_that_can_be_served(tmp_path: Path) -> None:
    for names in (("model.safetensors",), ("model-1.safetensors", "pytorch_model.bin", "x.gguf")):
        check_model_folder(files("config.json", *names)(tmp_path))


def test_a_name_on_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a router, which reads the tokenizer first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in ("Qwen/Qwen3-0.6B", "gpt2"):
        (reason,) = folder_reasons(Path(name))
        assert f"`hf download {name} --local-dir DIR`" in reason
        with pytest.raises(Unservable, match=f"{name}: no such folder.* models are not downloaded"):
            Tokenizer(name)
    files("config.json")(tmp_path / "hf/hub/models--Qwen--Qwen3-0.6B/snapshots/1f2e")
    (reason,) = folder_reasons(Path("Qwen/Qwen3-0.6B"))
    assert "in the Hugging Face cache" in reason
    assert reason.endswith("models--Qwen--Qwen3-0.6B/snapshots/1f2e")
