"""Whether a folder holds a model in a form that is served: config.json and *.safetensors.

Reads names and a few bytes; needs neither torch nor transformers. Each reason says what to do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrelay.errors import Unservable

WANTED = "a model is a local folder with config.json and *.safetensors"
INDEX = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POINTER = b"version https://git-lfs"
_CONVERT = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
_MERGE = "merge it into the weights with peft (merge_and_unload, save_pretrained)"


def check_model_folder(path: str | Path, weights: bool = True) -> None:
    """Raises ``Unservable`` with every reason that the names of the files show.

    Without ``weights`` only why there is no config.json: one that is there has further reasons.
    """
    folder = Path(path)
    if reasons := folder_reasons(folder) if weights else _reasons_before_weights(folder):
        raise Unservable(f"{path}: {joined(reasons)}")


def folder_reasons(folder: Path) -> tuple[str, ...]:
    """Why no model can be served from this folder, as far as the names of its files show."""
    return _reasons_before_weights(folder) or tuple(_weights_reasons(folder))


def _reasons_before_weights(folder: Path) -> tuple[str, ...]:
    missing = missing_folder(folder)
    return tuple(_config_reasons(folder)) if missing is None else (missing,)


def missing_folder(folder: Path) -> str | None:
    """Why there is no such folder, ``None`` if there is one."""
    if folder.is_dir():
        return None
    if folder.suffix == ".gguf":
        return f"GGUF files are not served: {WANTED}, so download the original model"
    if folder.exists():
        return f"is no folder: {WANTED}"
    name = str(folder)
    if not _HUB_NAME.fullmatch(name):
        return f"no such folder: {WANTED}"
    if (cached := _cached(name)) is not None:
        return f"no such folder, but that model is in the Hugging Face cache: give {cached}"
    return (
        f"no such folder, and models are not downloaded: if it is a name on Hugging Face, run"
        f" `hf download {name} --local-dir DIR` and give DIR"
    )


def joined(reasons: Sequence[str]) -> str:
    """One reason as it is, several with their number."""
    if len(reasons) == 1:
        return reasons[0]
    numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
    return f"{len(reasons)} reasons: {numbered}"


def _config_reasons(folder: Path) -> Iterator[str]:
    """What such a folder is, if it has no config.json."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        yield f"a LoRA adapter without its model: {_MERGE}, and give the folder of the result"
    elif any(folder.glob("*.gguf")):
        yield f"only GGUF files, which are not served: {WANTED}, so download the original model"
    elif (folder / "params.json").is_file():
        yield "weights in Meta's or Mistral's own format: download the Hugging Face form"
    elif found := sorted(folder.glob("snapshots/*/config.json")):
        yield f"a folder of the Hugging Face cache: give {found[-1].parent}"
    else:
        yield f"no config.json in it: {WANTED}"


def _weights_reasons(folder: Path) -> Iterator[str]:
    """What is wrong with the weights of a folder that has a config.json."""
    adapter = (folder / "adapter_config.json").is_file()
    files = [
        path for path in folder.glob("*.safetensors") if path.name != "adapter_model.safetensors"
    ]
    if adapter and files:
        yield (
            "a LoRA adapter (adapter_config.json) lies beside the model and would be ignored:"
            f" {_MERGE}, or take the adapter's files out of the folder"
        )
    elif adapter:
        yield f"a LoRA adapter without the weights of its model: {_MERGE}"
    elif not files and any(folder.glob("*.gguf")):
        yield "no *.safetensors in it; GGUF files are not served: download the original model"
    elif not files and any(
        path for end in ("bin", "pt", "pth") for path in folder.glob(f"*.{end}")
    ):
        yield (
            "no *.safetensors in it; .bin, .pt and .pth files are pickles, which are never loaded:"
            f" convert them with {_CONVERT}"
        )
    elif not files:
        yield "no *.safetensors in it: is the download complete?"
    if pointers := [path.name for path in files if _is_pointer(path)]:
        yield f"{pointers[0]} is a Git LFS pointer, not weights: run `git lfs pull` in the folder"
    if absent := sorted(_named(folder / INDEX) - {path.name for path in files}):
        yield (
            f"{len(absent)} of the weight files that {INDEX} names are missing, {absent[0]} for"
            " one: download them"
        )


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _named(index: Path) -> set[str]:
    """The files that the index of a sharded model names; none if it cannot be read."""
    try:
        return set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the Hugging Face cache."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    folder = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [path.parent for path in folder.glob("*/config.json")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
