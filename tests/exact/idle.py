"""Checks that workers hold nothing at the end of a test."""

from __future__ import annotations

import math
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
    """No block, request or save is held on any worker, and the audit is clean; seconds waited.

    Fails if nothing was given back for ``within`` seconds: on a busy machine the rest takes longer.
    """
    begun = time.monotonic()
    since, least = begun, math.inf
    while True:
        asked = time.monotonic()  # before the question: this process may stand still after it
        seen = loads(up)
        held = sum(map(_busy, seen))
        if not held:
            break
        if held < least:
            since, least = asked, held
        assert asked - since < within, [load for load in seen if _busy(load)]
    for channel in _channels(up):
        audit = worker_pb2_grpc.WorkerServiceStub(channel).Audit(
            worker_pb2.AuditRequest(), timeout=10.0
        )
        assert not audit.findings, audit
    return asked - begun


def _busy(load: worker_pb2.WorkerLoad) -> int:
    return load.waiting + load.loading + load.running + load.held_blocks + load.saving


def _channels(up: Cluster) -> list[grpc.Channel]:
    addresses = (*up.addresses("prefill"), *up.addresses("decode"))
    return [grpc.insecure_channel(address) for address in addresses]
