"""Loads a `transformers` decoder from a local directory, or refuses it with the reason.

The config and the modules are checked before the weights are read. Afterwards the model as it will
run is compared with `transformers`' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from kvrelay.engine.attention.backend import ATTENTION, paged_attention
from kvrelay.engine.attention.native.library import check_openmp, products_of
from kvrelay.engine.attention.native.products import NoProducts, Products
from kvrelay.engine.attention.pool import DTYPES, PoolShape
from kvrelay.engine.model.capability import position_limit, servable_length
from kvrelay.engine.model.config_values import foreign_reason, value_reasons
from kvrelay.engine.model.decoder import Decoder
from kvrelay.engine.model.decoder_weights import extract_weights
from kvrelay.engine.model.device import open_device
from kvrelay.engine.model.forward import CausalModel, TransformersModel
from kvrelay.engine.model.packed_linear import limit_onednn, pack_linears
from kvrelay.engine.model.pretrained import FOREIGN, read_config, read_weights, revision
from kvrelay.engine.model.probe import compare_logits, observe_model, reference_logits
from kvrelay.errors import Unservable
from kvrelay.model_folder import folder_reasons, joined
from kvrelay.process.progress import Progress

LONGEST_REASON = 300  # characters of an error of another library

AttentionInterface.register(ATTENTION, paged_attention)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is. ``name`` is its directory's, ``revision`` a digest of config and weights.

    ``num_heads``, ``num_kv_heads`` and ``head_dim`` are as observed in its attention;
    ``logit_error`` is the largest difference between paged and own attention seen at start,
    as a share of the largest logit.
    """

    name: str
    revision: str
    architecture: str
    dtype: str
    device: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    position_limit: int | None  # the model's own
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    logit_error: float


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, checked at start."""

    info: ModelInfo
    forward: CausalModel
    device: torch.device

    @property
    def products(self) -> Products | NoProducts:
        """The products of its packed layers."""
        if self.device.type != "cpu":
            return NoProducts(f"the model is on {self.device}", notable=False)
        return products_of(DTYPES[self.info.dtype])

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights."""
        return self.info.num_parameters * DTYPES[self.info.dtype].itemsize

    def pool_shape(self, num_blocks: int, block_size: int) -> PoolShape:
        """The shape of a KV pool for this model."""
        info = self.info
        return PoolShape(
            num_blocks, info.num_layers, block_size, info.num_kv_heads, info.head_dim, info.dtype
        )


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    attention_backend: str = "auto",
) -> LoadedModel:
    """Load from a directory with ``config.json`` and ``*.safetensors`` (sharded or not).

    ``dtype`` is "float32", "bfloat16", "float16" or "auto" (the config's own); ``device`` "cpu",
    "cuda" or "auto". The model is tested with ``attention_backend``. Raises ``Unservable`` with all
    reasons if it cannot be served exactly, ``Rejected`` for variables that OpenMP reads.
    """
    directory = Path(path)
    limit_onednn()
    with _explained(directory), torch.inference_mode(), Progress() as progress:
        progress.phase = f"checking the model in {directory}"
        where = open_device(device)
        if where.type == "cpu":
            check_openmp(torch.get_num_threads())
        kind, max_len = _check(directory, dtype, max_model_len)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        progress.phase = f"reading {size / 1e9:.1f} GB of weights from {directory}"
        model = read_weights(directory, kind, where)
        progress.phase = f"preparing the weights of {directory} and testing the model"
        return _checked(directory, model, kind, where, max_len, attention_backend)


def check_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
) -> tuple[torch.device, str]:
    """The device and the dtype to serve a model with.

    Raises ``Unservable`` as ``load_model`` does, as far as the model shows without weights.
    """
    directory = Path(path)
    with _explained(directory):
        return open_device(device), _check(directory, dtype, max_model_len)[0]


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except Unservable as error:
        raise Unservable(f"{directory}: {error}") from None
    except FOREIGN as error:
        raise Unservable(f"{directory}: cannot be loaded: {_line(error)}") from error


def _check(directory: Path, dtype: str, asked: int | None) -> tuple[str, int]:
    """The dtype and the longest sequence to serve; ``Unservable`` with all reasons."""
    known = list(folder_reasons(directory))
    if wrong := value_reasons(directory):
        raise Unservable(joined([*wrong, *known]))
    try:
        config = read_config(directory)
    except FOREIGN as error:
        own = (foreign_reason(error, directory),) if (directory / "config.json").is_file() else ()
        raise Unservable(joined([*own, *known])) from error
    kind = _dtype(config, dtype)
    if kind not in DTYPES:
        known.append(f"dtype {kind}: only {', '.join(DTYPES)} are served, so choose one of them")
    return kind, servable_length(config, asked, known)


def _checked(
    directory: Path,
    model: PreTrainedModel,
    dtype: str,
    device: torch.device,
    max_len: int,
    attention_backend: str,
) -> LoadedModel:
    forward = TransformersModel(model)
    seen = observe_model(forward, device, max_len)
    vocab = _vocab(model, seen.vocab)
    shape = PoolShape(1, seen.layers, 1, seen.kv_heads, seen.head_dim, dtype)
    own = reference_logits(forward, device, vocab)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compute = computing(forward, max_len)
    error = compare_logits(compute, shape, device, own, attention_backend)
    info = ModelInfo(
        name=directory.resolve().name,
        revision=revision(directory),
        architecture=type(model).__name__,
        dtype=dtype,
        device=device.type,
        num_layers=shape.num_layers,
        num_heads=seen.heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=vocab,
        max_model_len=max_len,
        position_limit=position_limit(model.config),
        eos_token_ids=tuple(token for token in _eos(model) if 0 <= token < vocab),
        num_parameters=parameters,
        logit_error=error,
    )
    return LoadedModel(info, compute, device)


def computing(forward: TransformersModel, max_len: int) -> CausalModel:
    """Our forward if the model is a known one, else its own with packed layers."""
    known = extract_weights(forward.model, max_len)
    if known is not None:
        return Decoder(known)
    pack_linears(forward.model)
    forward.set_attention(ATTENTION)
    return forward


def _vocab(model: PreTrainedModel, logits: int) -> int:
    rows = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    if rows != logits:
        raise Unservable(f"{rows} token ids go in, but {logits} logits come out")
    return rows


def _dtype(config: PreTrainedConfig, asked: str) -> str:
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return own if asked == "auto" else asked


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model.generation_config, "eos_token_id", None)
    eos = generation if generation is not None else getattr(model.config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.{LONGEST_REASON}}"
