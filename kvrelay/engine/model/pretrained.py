"""Reads a model directory with `transformers`: local files, none of the model's code, no pickle."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, cast

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from kvrelay.engine.attention.pool import DTYPES
from kvrelay.errors import Unservable

FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What ``transformers`` raises for a broken or unknown model."""


class _Report(TypedDict):
    """The part of the loading report of `transformers` that is read here."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, torch.Size, torch.Size]]  # shapes in the files, in the modules


def read_config(directory: Path) -> PreTrainedConfig:
    """The config of a model directory."""
    raw, _ = PreTrainedConfig.get_config_dict(directory)
    if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
        raise Unservable(
            f"code of its own for the model type {raw.get('model_type')!r} (auto_map in"
            " config.json), which is never run: choose a model that `transformers` implements"
        )
    return cast(
        PreTrainedConfig,
        AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
    )


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The modules without weights, on the meta device."""
    build = cast(Callable[..., PreTrainedModel], AutoModelForCausalLM.from_config)
    with torch.device("meta"):
        return build(config, trust_remote_code=False)


def read_weights(directory: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode, every weight from the files.

    Weights in the files' dtype stay views of the mapped files until each is moved to the device, so
    host memory holds no copy of the model. Weights that are converted are copies in host memory.

    Raises ``Unservable`` if one is missing or has another shape: `transformers` would initialise it
    at random.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    load = cast(
        Callable[..., tuple[PreTrainedModel, _Report]], AutoModelForCausalLM.from_pretrained
    )
    try:
        model, report = load(
            directory,
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except SafetensorError as error:
        raise Unservable(f"the weights cannot be read ({error}): download them again") from error
    if others := sorted(report["mismatched_keys"]):
        name, stored, wanted = others[0]
        raise Unservable(
            f"{len(others)} weights have other shapes than config.json says, {name} for one:"
            f" {list(stored)} in the files, {list(wanted)} by config.json: take both from the same"
            " checkpoint"
        )
    if missing := sorted(report["missing_keys"]):
        raise Unservable(
            f"{len(missing)} weights are missing from the files, {missing[0]} for one: download"
            " them, and take config.json from the same checkpoint"
        )
    model.train(False)
    torch.nn.Module.to(model, device)  # in place
    return model


def revision(directory: Path) -> str:
    """The digest that names the weights: XXH3-128 over ``config.json`` and ``*.safetensors``.

    It covers the names, sizes and bytes of these files, so workers with other weights never share
    blocks; a renamed directory is the same model. Runs at the speed of the page cache (several
    GB/s).
    """
    digest = xxhash.xxh3_128()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                digest.update(data)
    return digest.hexdigest()
