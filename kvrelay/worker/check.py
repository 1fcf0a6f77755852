"""``python -m kvrelay.worker.check``: whether a worker with these flags could serve its model.

Takes a worker's flags. Reads the model's config and builds its modules without weights, or asks
vLLM for its configuration, so it takes a moment where a worker takes as long as reading the
weights. Ends with status 1 and one line if the model, the device or the attention backend is
refused; ``kvrelay up`` runs it before it starts anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvrelay.config.reader import load
from kvrelay.errors import Rejected, Unservable
from kvrelay.process.gpus import show_one
from kvrelay.worker.config import WorkerConfig

SERVABLE = "the model can be served"


def main(argv: Sequence[str]) -> int:
    config = load(WorkerConfig, argv, "python -m kvrelay.worker.check", "Check a worker's model.")
    try:
        _check(config)
    except (Unservable, Rejected) as error:
        print(" ".join(str(error).split()), flush=True)
        return 1
    print(SERVABLE, flush=True)
    return 0


def _check(config: WorkerConfig) -> None:
    """``Unservable`` with every reason; ``Rejected`` for an attention backend of no use here.

    What a backend refuses for the model's head size shows when the worker starts. Imports torch or
    vLLM.
    """
    if config.engine == "vllm":
        from kvrelay.worker.engines.vllm import check_vllm

        check_vllm(config)
        return
    asked = show_one(config.device)
    from kvrelay.engine.attention.choice import choose_attention, least_block_size
    from kvrelay.engine.attention.pool import KVPool, PoolShape
    from kvrelay.engine.model.loading import check_model

    device, dtype = check_model(config.model, config.dtype, asked, config.max_model_len)
    if (name := config.attention_backend) != "auto":
        any_model = PoolShape(1, 1, least_block_size(name), 1, 64, dtype)
        choose_attention(name, KVPool(any_model, device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
