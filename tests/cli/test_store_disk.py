"""The disk of the store that ``kvrelay up`` starts."""

from __future__ import annotations

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.supervisor import STOP_SECONDS
from kvrelay.errors import Rejected


def args_of_store(config: ClusterConfig) -> tuple[str, ...]:
    return next(spec.args for spec in process_specs(config) if spec.role == "store")


def test_the_store_is_told_of_its_disk() -> None:
    args = args_of_store(ClusterConfig(store_disk="/disk", store_disk_budget=5 << 30))
    assert args[args.index("--disk") + 1] == "/disk"
    assert args[args.index("--disk-budget") + 1] == str(5 << 30)
    assert "--restore" in args
    assert float(args[args.index("--flush-seconds") + 1]) < STOP_SECONDS
    assert "--restore" not in args_of_store(ClusterConfig(store_disk="/disk", restore=False))
    assert "--disk" not in args_of_store(ClusterConfig())


def test_a_disk_is_for_a_store_of_our_own() -> None:
    with pytest.raises(Rejected, match="store_disk"):
        ClusterConfig(store="kvrelay://elsewhere:1", store_disk="/disk")
