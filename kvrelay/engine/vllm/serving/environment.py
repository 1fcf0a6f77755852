"""What vLLM reads from the environment, set before its import; what a user has set is kept."""

from __future__ import annotations

import logging
import os

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner has not been run with our sampler
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go to the handlers of the worker
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models are local folders
}


def prepare() -> None:
    """Call it before the first import of vLLM."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.WARNING)
