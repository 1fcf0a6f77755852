"""The version of this release, as in pyproject.toml, and the version of vLLM that it serves."""

import re

VERSION = "0.1.0"
VLLM = "0.32"


def tested_vllm(version: str) -> bool:
    """Whether this is a release of the vLLM that kvrelay was tested with."""
    return re.match(rf"{re.escape(VLLM)}(?!\d)", version) is not None
