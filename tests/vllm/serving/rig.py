"""A cluster whose workers run vLLM, and calls of single workers.

The model is the shipped one in float32. Two vLLM processes cut a prompt into other chunks, and its
logits then differ by up to 2.5e-6. The prompts and seeds of these tests have no two candidates so
near: they were drawn once, and answered equally whole, cut and by the native engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.process import RestartBackoff
from kvrelay.cluster.supervisor import Cluster
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

BLOCK = 32
BLOCKS = 200
WORDS = range(10, 498)  # token ids that are no special token of the shipped model
START_SECONDS = 240.0
WAIT = 60.0
BACKOFF = RestartBackoff(first=0.05, longest=0.2)


@dataclass(slots=True)
class VllmCluster:
    """A running cluster; ``lines`` is the output of all processes so far."""

    cluster: Cluster
    lines: list[str] = field(default_factory=list)

    @property
    def router(self) -> str:
        return self.cluster.router

    def workers(self) -> list[str]:
        """The addresses of all workers."""
        return [*self.cluster.addresses("prefill"), *self.cluster.addresses("decode")]

    def load(self, address: str) -> worker_pb2.WorkerLoad:
        """The load of a worker."""
        with self._channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=WAIT).load

    def audit(self, address: str) -> Sequence[worker_pb2.AuditFinding]:
        """The invariants that are broken on a worker."""
        with self._channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.Audit(worker_pb2.AuditRequest(), timeout=WAIT).findings

    def set_role(self, address: str, role: types_pb2.Role.ValueType) -> worker_pb2.WorkerInfo:
        """Change the role of a worker."""
        with self._channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            request = worker_pb2.SetRoleRequest(role=role)
            return stub.SetRole(request, timeout=WAIT).info

    def decode(
        self, address: str, leg: types_pb2.Leg
    ) -> tuple[list[types_pb2.Token], types_pb2.LegUsage]:
        """A leg on one worker, without the router."""
        tokens: list[types_pb2.Token] = []
        with self._channel(address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            for message in stub.Decode(decode_pb2.DecodeRequest(leg=leg), timeout=WAIT):
                tokens += message.tokens
        return tokens, message.usage

    def streaming(self) -> list[int]:
        """The indices of the decode workers that compute now."""
        addresses = self.cluster.addresses("decode")
        return [index for index, one in enumerate(addresses) if self.load(one).running]

    def settle(self) -> None:
        """Wait until every process serves, and no worker computes, loads or saves."""
        self.cluster.wait(START_SECONDS)
        deadline = time.monotonic() + WAIT
        for address in self.workers():
            while busy(self.load(address)):
                assert time.monotonic() < deadline, f"{address}: {self.load(address)}"
                time.sleep(0.05)

    @contextmanager
    def _channel(self, address: str) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(address) as channel:
            yield channel


def busy(load: worker_pb2.WorkerLoad) -> bool:
    """Whether a worker has anything left to do."""
    return bool(load.running or load.waiting or load.loading or load.saving or load.held_blocks)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Token ids at random."""
    chance = random.Random(seed)
    return tuple(chance.choice(WORDS) for _ in range(length))


@contextmanager
def vllm_cluster(
    python: str, prefill: int = 1, decode: int = 2, **options: str
) -> Iterator[VllmCluster]:
    """A running cluster; its last lines are printed at the end. ``options`` are vLLM's."""
    given = {"enforce_eager": "true", **options}
    config = ClusterConfig(
        engine="vllm",
        vllm_python=python,
        vllm_option=tuple(f"{name}={value}" for name, value in given.items()),
        port=0,
        dtype="float32",
        prefill=prefill,
        decode=decode,
        block_size=BLOCK,
        num_blocks=BLOCKS,
        max_num_seqs=16,
        disaggregate="always",
        store_budget=1 << 28,
        queue_seconds=600.0,
    )
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_AUDIT", "true")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        made = Cluster(
            config,
            on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"),
            on_change=lambda spec, line: lines.append(f"{spec.name}| {line}"),
            backoff=BACKOFF,
        )
        try:
            made.start(START_SECONDS)
            yield VllmCluster(made, lines)
        finally:
            made.stop()
            print("\n".join(lines[-400:]))
