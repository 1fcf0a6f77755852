"""The namespace of vLLM's blocks: everything besides the tokens that decides their bytes.

What vLLM is told at start and the model's files do not show, quantisation and overrides of the
configuration, becomes part of the revision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kvrelay.block.namespace import LAYOUT, Namespace
from kvrelay.engine.model.pretrained import revision
from kvrelay.errors import Rejected, Unservable

TEXTS = ("model", "revision", "dtype", "layout", "numerics")
FIELDS = (*TEXTS, "block_size")
SALT_BYTES = 32
OTHER_CONFIGS = ("params.json", "hf_quant_config.json")
"""Of a model's folder: what vLLM may read besides config.json."""

UNNAMED = 'so its KV has no lasting name; a connector takes one, "namespace": {"revision": ...}'
_FOREIGN_SALT = b"kvrelay.vllm-cache-salt.v1"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What vLLM was told about its model; ``commit`` is that of a model from Hugging Face.

    ``told``: what else decides how the weights are read and computed with, by vLLM's names; what is
    empty was not told. ``unnamed``: why neither the files nor a commit tell what is computed.
    """

    model: str
    dtype: str
    block_size: int
    commit: str | None = None
    told: Mapping[str, object] = field(default_factory=dict)
    unnamed: str = ""


def namespace_of(
    facts: ModelFacts,
    numerics: Callable[[], str],
    given: Mapping[str, object],
    fleet_key_id: bytes = b"",
) -> Namespace:
    """The namespace; ``given`` fields (``kv_connector_extra_config["namespace"]``) count instead.

    Raises ``Rejected`` for unknown or wrong fields, ``Unservable`` if the weights have no name.
    """
    _check(facts, given)
    texts = {name: str(given[name]) for name in TEXTS if name in given}
    return Namespace(
        model=texts.get("model") or Path(facts.model).resolve().name,
        revision=texts.get("revision") or revision_of(facts),
        dtype=facts.dtype,
        layout=texts.get("layout") or LAYOUT,
        block_size=facts.block_size,
        numerics=texts["numerics"] if "numerics" in texts else numerics(),
        fleet_key_id=fleet_key_id,
    )


def _check(facts: ModelFacts, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if name not in FIELDS:
            raise Rejected(f"namespace.{name}", f"unknown, choose of {', '.join(FIELDS)}")
        kind = int if name == "block_size" else str
        if not isinstance(value, kind):
            raise Rejected(f"namespace.{name}", f"must be a {kind.__name__}, got {value!r}")
        if name != "numerics" and not value:
            raise Rejected(f"namespace.{name}", "is empty: leave it out for the default")
    for name, own in (("dtype", facts.dtype), ("block_size", facts.block_size)):
        if given.get(name, own) != own:
            raise Rejected(f"namespace.{name}", f"{given[name]} is given, vLLM has {own}")


@lru_cache(maxsize=4)
def _of_folder(folder: Path) -> str:
    """Both sides of the connector in one process read the weights once."""
    return revision(folder)


def revision_of(facts: ModelFacts) -> str:
    """A digest of the model's files, or its commit; with what vLLM was told to change."""
    if facts.unnamed:
        raise Unservable(f"{facts.unnamed}, {UNNAMED}")
    folder = Path(facts.model)
    told = {key: value for key, value in facts.told.items() if value}
    if folder.is_dir():
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise Unservable(f"{facts.model!r} has no config.json or *.safetensors, {UNNAMED}")
        name = _of_folder(folder)
        for other in OTHER_CONFIGS:
            if (folder / other).is_file():
                told[other] = hashlib.sha256((folder / other).read_bytes()).hexdigest()
    elif facts.commit:
        name = facts.commit
    else:
        raise Unservable(
            f"{facts.model!r} is neither a folder nor a download with a commit, {UNNAMED}"
        )
    if not told:
        return name
    text = json.dumps(told, sort_keys=True, default=repr)
    return f"{name}+{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def rotated_for(config: object, max_model_len: int) -> int | None:
    """``max_model_len`` of a model with LongRoPE: vLLM chooses its factors by it."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    return max_model_len if kind == "longrope" else None


def space_of(cache_salt: str | None) -> bytes:
    """The tenant salt of a request: vLLM's ``cache_salt`` as hex, or a digest of any other text."""
    if not cache_salt:
        return b""
    if len(cache_salt) == 2 * SALT_BYTES and not set(cache_salt) - set("0123456789abcdef"):
        return bytes.fromhex(cache_salt)
    return hashlib.sha256(_FOREIGN_SALT + cache_salt.encode("utf-8", "surrogatepass")).digest()
