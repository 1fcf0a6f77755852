"""``python -m kvrelay.engine.vllm.serving.describe``: what vLLM of this interpreter a worker has.

Prints one JSON object, for ``kvrelay doctor``. Imports vLLM and loads no model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch

from kvrelay.engine.vllm.kv.profile import attention_backend, batch_invariant
from kvrelay.engine.vllm.serving.environment import prepare
from kvrelay.errors import KvrelayError
from kvrelay.installation import missing

HEAD = 128
BLOCK = 32


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """``attention`` is the backend for bfloat16 heads of 128 in blocks of 32."""

    version: str
    platform: str
    runner: str
    attention: str
    batch_invariant: bool
    missing: tuple[str, ...]


def facts() -> VllmFacts:
    """What a worker in this environment would run."""
    prepare()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.version import __version__

    config = VllmConfig()
    with set_current_vllm_config(config):
        attention = attention_backend(HEAD, torch.bfloat16, BLOCK, "auto")
    return VllmFacts(
        version=__version__,
        platform=current_platform.device_type,
        runner="V2" if config.use_v2_model_runner else "V1",
        attention=attention,
        batch_invariant=batch_invariant(),
        missing=missing("base", "worker-vllm"),
    )


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(facts())))
    except (KvrelayError, ImportError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))
