"""Checks that workers hold nothing at the end of a test."""

from __future__ import annotations

import time

import grpc

from kvrelay.cluster.supervisor import Cluster
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

PATIENCE = 10.0


def loads(up: Cluster) -> list[worker_pb2.WorkerLoad]:
    """The load of every worker."""
    return [
        worker_pb2_grpc.WorkerServiceStub(channel)
        .GetLoad(worker_pb2.GetLoadRequest(), timeout=10.0)
        .load
        for channel in _channels(up)
    ]


def check_idle(up: Cluster, within: float = PATIENCE) -> float:
    """No block, request or save is held on any worker, and the audit is clean; seconds waited."""
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun  # at the question: this process may stand still after it
        seen = loads(up)
        busy = [load for load in seen if _busy(load)]
        if not busy:
            break
        assert waited < within, busy
    for channel in _channels(up):
        audit = worker_pb2_grpc.WorkerServiceStub(channel).Audit(
            worker_pb2.AuditRequest(), timeout=10.0
        )
        assert not audit.findings, audit
    return waited


def _busy(load: worker_pb2.WorkerLoad) -> int:
    return load.waiting + load.loading + load.running + load.held_blocks + load.saving


def _channels(up: Cluster) -> list[grpc.Channel]:
    addresses = (*up.addresses("prefill"), *up.addresses("decode"))
    return [grpc.insecure_channel(address) for address in addresses]
