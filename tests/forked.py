"""Clusters whose store and router are forked too, which saves half of the work of a start.

``kvrelay up`` runs these two in interpreters of their own, as the tests of the command and of the
supervisor do.
"""

from __future__ import annotations

from dataclasses import replace

from kvrelay.cluster import spawn
from kvrelay.cluster.process import ProcessSpec

# Read when the fork server starts, which is after the import of every test module.
spawn.PRELOADED += [
    "router.main",
    "kvstore.main",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
]


def all_forked(specs: tuple[ProcessSpec, ...]) -> tuple[ProcessSpec, ...]:
    """The processes, store and router forked; the workers as they are."""
    return tuple(
        replace(spec, forked=True) if spec.role in ("store", "router") else spec for spec in specs
    )
