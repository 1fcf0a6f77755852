"""Sends one short prompt to every worker, so that no time shown later is a process's first run."""

from __future__ import annotations

import uuid

import grpc

from kvrelay.cluster.layout import WORKERS
from kvrelay.cluster.supervisor import Cluster
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

PROMPT = [8] * 40
MAX_TOKENS = 2
SECONDS = 60.0


def warm_up(cluster: Cluster) -> None:
    """The first worker computes the prompt, the others load it: both paths then have run once."""
    for role in WORKERS:
        for address in cluster.addresses(role):
            try:
                _run_leg(role, address)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error


def _run_leg(role: str, address: str) -> None:
    leg = types_pb2.Leg(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=PROMPT,
        max_tokens=MAX_TOKENS,
        sampling=types_pb2.Sampling(temperature=0.0, ignore_eos=True),
    )
    with open_sync_channel(address) as channel:
        if role == "prefill":
            prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
            list(prefill.Prefill(prefill_pb2.PrefillRequest(leg=leg), timeout=SECONDS))
        else:
            decode = decode_pb2_grpc.DecodeServiceStub(channel)
            list(decode.Decode(decode_pb2.DecodeRequest(leg=leg), timeout=SECONDS))
