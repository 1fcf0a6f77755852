"""Workers of two instruction sets: strict never mixes their KV and streams; loose does and counts.

The instruction set is forced on each worker by ``ATEN_CPU_CAPABILITY``, so the machine needs AVX2
and more. In float32 the two profiles differ in the last bits of KV and logits where attention is
SDPA; the native kernel gives the same bits on all, and then only the profiles' names differ.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from kvrelay import Client, Completion
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster
from kvrelay.usage import Miss
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle
from tests.exact.scrape import scrape
from tests.models import VOCAB

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"),
        reason="needs a CPU with more than one instruction set that PyTorch tells apart",
    ),
]
NUMERICS = pytest.mark.parametrize(
    "numerics", ["strict", pytest.param("loose", marks=pytest.mark.slow)]
)
NEW, PROMPT = 24, 70
Layout = Callable[[ClusterConfig], tuple[ProcessSpec, ...]]


def mixed(metrics: int, capabilities: Mapping[str, str]) -> Layout:
    """A layout in which workers, by name, have these instruction sets."""

    def layout(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
        return tuple(changed(spec) for spec in process_specs(config))

    def changed(spec: ProcessSpec) -> ProcessSpec:
        if spec.role == "router":
            return replace(spec, args=(*spec.args, "--metrics-port", str(metrics)))
        if spec.name not in capabilities:
            return spec
        environ = {**spec.environ, "ATEN_CPU_CAPABILITY": capabilities[spec.name]}
        return replace(spec, environ=environ, forked=False)

    return layout


def profiles(address: str) -> dict[str, str]:
    """The numeric profile of each worker, by role."""
    with Client(address) as client:
        infos = {one.role: one.info for one in client.fleet().workers}
    return {str(role): info.numeric_profile for role, info in infos.items() if info is not None}


def same_prompt_at_two_workers(up: Cluster, prompt: list[int]) -> list[Completion]:
    """The worker that gave the first answer is killed before the second question."""
    with Client(up.router) as client:

        def complete() -> Completion:
            return client.complete(
                token_ids=prompt, max_tokens=NEW, temperature=0.0, explain=True, timeout=60.0
            )

        first = complete()
        (leg,) = first.usage.legs
        index = next(s.index for s in up.specs if s.role == "decode" and s.address == leg.address)
        up.process("decode", index).end(signal.SIGKILL)  # and it is not started again
        while any(one.healthy and one.address == leg.address for one in client.fleet().workers):
            time.sleep(0.01)
        return [first, complete()]


@NUMERICS
def test_legs_of_one_stream(models: Models, numerics: str) -> None:
    """A prefill worker with AVX2, a decode worker with more: strict leaves the former out."""
    (port,) = free_ports(1)
    prompt = random.Random(7).sample(range(VOCAB), PROMPT)
    layout = mixed(port, {"prefill-0": "avx2"})
    with cluster(models("llama"), layout, numerics=numerics, attention_backend="sdpa") as up:
        found = profiles(up.router)
        assert "AVX2" in found["prefill"]
        assert found["prefill"].rpartition("/")[2] != found["decode"].rpartition("/")[2]
        with Client(up.router) as client:
            done = client.complete(token_ids=prompt, max_tokens=NEW, temperature=0.0)
        counted = scrape(port)("router_mixed_numerics_legs")
        check_idle(up)
    assert len(done.token_ids) == NEW
    roles = [leg.role for leg in done.usage.legs]
    external = sum(leg.external for leg in done.usage.legs)
    if numerics == "strict":
        assert (roles, external, counted) == (["decode"], 0, 0)
    else:
        assert (roles, external, counted) == (["prefill", "decode"], PROMPT, 1)


@NUMERICS
def test_blocks_of_another_profile(models: Models, numerics: str) -> None:
    """Two decode workers meet the same prompt: strict computes it twice and says why."""
    (port,) = free_ports(1)
    prompt = random.Random(8).sample(range(VOCAB), PROMPT)
    layout = mixed(port, {"decode-0": "avx2"})
    with cluster(models("llama"), layout, prefill=0, decode=2, numerics=numerics) as up:
        first, second = same_prompt_at_two_workers(up, prompt)
    legs = [*first.usage.legs, *second.usage.legs]
    assert [leg.role for leg in legs] == ["decode", "decode"]
    assert legs[0].address != legs[1].address
    assert legs[0].missed[0].reason is Miss.NEVER_STORED
    if numerics == "strict":
        assert second.usage.cached_prompt_tokens == legs[1].external == 0
        assert [missed.reason for missed in legs[1].missed] == [Miss.OTHER_NUMERICS]
    else:
        assert second.usage.cached_prompt_tokens == legs[1].external > 0
