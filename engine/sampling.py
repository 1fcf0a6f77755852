"""The sampling record under its former name; it lives in ``common.sampling``."""

from common.sampling import Sampling

__all__ = ["Sampling"]
