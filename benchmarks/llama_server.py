"""llama.cpp's server on a `transformers` folder.

    PYTHON llama_server.py FOLDER PORT THREADS [--cache] [--batch TOKENS]

Runs in an environment of its own, with numpy, gguf and xllamacpp. It writes a Llama or Qwen3 model
in bfloat16 as GGUF to a temporary folder, with texts that stand for token ids, and serves that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

Words = NDArray[np.uint16]
SLOTS = 16  # requests at once
CONTEXT = 16384  # positions of all slots together
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tensors(folder: Path) -> Iterator[tuple[str, Words]]:
    """The bfloat16 tensors of all files, as words."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        size = int(data[:8].view(np.uint64)[0])
        header: Mapping[str, dict[str, object]] = json.loads(data[8 : 8 + size].tobytes())
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {about['dtype']}, and only BF16 is written")
            first, last = cast("list[int]", about["data_offsets"])
            words = data[8 + size + first : 8 + size + last].view(np.uint16)
            yield name, words.reshape(cast("list[int]", about["shape"]))


def own_name(name: str) -> str:
    """The name of a tensor in GGUF."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def paired(words: Words, heads: int) -> Words:
    """Rows of Q or K with the two elements that are rotated together side by side."""
    rows = words.reshape(heads, 2, -1, words.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(words.shape)


def write(folder: Path, path: Path) -> None:
    """The model of a folder as one GGUF file."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    kind, heads, kv_heads = (
        config[name] for name in ("model_type", "num_attention_heads", "num_key_value_heads")
    )
    out = gguf.GGUFWriter(path, kind)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list([f"t{token}" for token in range(config["vocab_size"])])
    out.add_token_merges(["t 1"])
    out.add_eos_token_id(0)
    for name, words in tensors(folder):
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            words = paired(words, heads if "q_proj" in name else kv_heads)
        if words.ndim == 1:
            wide = (words.astype(np.uint32) << 16).view(np.float32)
            out.add_tensor(own_name(name), wide)
        else:
            raw = np.ascontiguousarray(words).view(np.uint8)
            out.add_tensor(own_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def serve(path: Path, port: int, threads: int, cache: bool, batch: int | None) -> None:
    """Serve until the process is ended. ``batch``: most tokens of a step."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.port = port
    options.n_ctx = CONTEXT
    options.n_parallel = SLOTS
    options.kv_unified = True
    options.cache_prompt = cache
    if batch is not None:
        options.n_batch = batch
        options.n_ubatch = batch
    options.cpuparams.n_threads = threads
    options.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--cache", action="store_true", help="keep prompts of earlier requests")
    parser.add_argument("--batch", type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "model.gguf"
        write(given.folder, path)
        serve(path, given.port, given.threads, given.cache, given.batch)


if __name__ == "__main__":
    main()
