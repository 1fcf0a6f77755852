"""The connector's sides put together as in vLLM, over a store that has stopped."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvrelay.engine.core.external import BlockContent
from kvrelay.engine.vllm.kv.checks import EngineFacts, GroupFacts
from kvrelay.engine.vllm.kv.namespace import ModelFacts
from kvrelay.engine.vllm.kv.orders import SaveOrder, SaveReport, StepOrders
from kvrelay.engine.vllm.kv.pages import PageShape
from kvrelay.engine.vllm.kv.setup import EngineView, Setup
from kvrelay.errors import Rejected
from tests.engine.vllm.rig import FakeLayer, HalvesWriter, caches
from tests.kvstore.conftest import start_service, stop

BLOCKS, SIZE = 40, 4
SHAPE = PageShape(BLOCKS, 2, SIZE, 2, 6, "float32")
GROUP = GroupFacts("FullAttentionSpec", 2, SIZE, 2, 6, 6, "float32")


@pytest.fixture
def stopped() -> Iterator[str]:
    process: subprocess.Popen[str]
    process, url = start_service("--budget=16MiB")
    process.send_signal(signal.SIGSTOP)
    yield url
    process.send_signal(signal.SIGCONT)
    stop(process)


def view_of(store: str) -> EngineView:
    return EngineView(
        facts=EngineFacts("kv_both", "recompute", (GROUP,)),
        model=ModelFacts("org/model", "float32", SIZE, commit="c0ffee"),
        numerics=lambda: "one machine",
        heads=2,
        ranks=1,
        num_blocks=BLOCKS,
        layer_names=("0", "1"),
        extra={"store": store},
    )


def test_an_audit_needs_steps_that_do_not_overlap() -> None:
    audited = replace(view_of("none"), extra={"store": "none", "audit": True})
    Setup(audited)
    with pytest.raises(Rejected, match="--no-async-scheduling"):
        Setup(replace(audited, overlapping=True))


@pytest.mark.cluster
def test_saves_that_wait_leave_vllm_most_of_its_pool(stopped: str) -> None:
    """Each save holds references on its blocks: those beyond a quarter of the pool are dropped."""
    setup = Setup(view_of(stopped))
    side = setup.worker_side([FakeLayer(HalvesWriter())] * 2, caches(SHAPE), 0)
    assert side is not None
    for serial in range(1, BLOCKS):
        content = BlockContent(serial, bytes(31) + bytes([serial]), bytes(32), (1, 2, 3, serial))
        order = SaveOrder("r", 1, serial, b"", ((content,),))
        side.save(StepOrders((), (order,), idle=False))
    dropped = range(1 + BLOCKS // 4, BLOCKS)
    side.take_loaded(idle=False)
    reports = side.take_reports()
    assert reports is not None
    assert reports.saves == {("r", 1, serial): SaveReport(0) for serial in dropped}
    assert side.counters.saves_dropped == len(dropped)
    side.close()
