"""Models and clusters of the exactness suite: real processes, every invariant checked each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.cluster.config import SHIPPED_MODEL, ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster
from tests.forked import all_forked
from tests.models import tiny_model

Models = Callable[[str], Path]
TRAINED = "recall"  # the kind of the model that is shipped


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The folder of a tiny model of one kind, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind == TRAINED:
            return SHIPPED_MODEL
        if kind not in made:
            made[kind] = tiny_model(kind, tmp_path_factory.mktemp(kind) / kind)
        return made[kind]

    return folder


@contextmanager
def cluster(
    model: Path,
    layout: Callable[[ClusterConfig], tuple[ProcessSpec, ...]] = process_specs,
    **settings: int | str,
) -> Iterator[Cluster]:
    """A running cluster; its logs are printed when the test fails.

    Workers check every invariant after every step. Timeouts are long for slow machines.
    """
    lines: list[str] = []
    # A store touches its memory at start: as little as tiny models need, or it takes a second.
    defaults: dict[str, int | str] = {"dtype": "float32", "disaggregate": "always"}
    if "store" not in settings:
        defaults["store_budget"] = 1 << 26
    config = ClusterConfig(model=str(model), port=0, **{**defaults, **settings})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:  # for the cluster alone, not for later tests
        patch.setenv("KVRELAY_AUDIT", "true")
        patch.setenv("KVRELAY_HEALTH_TIMEOUT", "20")
        patch.setenv("KVRELAY_HANDOFF_WAIT", "30")
        made = Cluster(
            config,
            on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"),
            layout=lambda config: all_forked(layout(config)),
        )
    try:
        with made as up:
            yield up
    finally:
        print("\n".join(lines[-200:]))
