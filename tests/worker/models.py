"""A model without weights, for what reads its description only."""

from __future__ import annotations

from typing import cast

import torch

from kvrelay.engine.model.forward import CausalModel
from kvrelay.engine.model.loading import LoadedModel, ModelInfo

LENGTH = 4096
POSITION = 2 * 2 * 4 * 8 * 2  # bytes: k and v, layers, heads, head_dim, bfloat16
MODEL = LoadedModel(
    ModelInfo(
        name="m",
        revision="r",
        architecture="A",
        dtype="bfloat16",
        device="cpu",
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=100,
        max_model_len=LENGTH,
        position_limit=LENGTH,
        eos_token_ids=(),
        num_parameters=1,
        logit_error=0.0,
    ),
    cast(CausalModel, None),
    torch.device("cpu"),
)
