"""One worker as this router knows it: its channel, what it said of itself, what it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from common.errors import KvrelayError, Unavailable
from protos import (
    decode_pb2_grpc,
    prefill_pb2_grpc,
    router_pb2,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.policy import Candidate
from rpc.channel import ChannelOptions, open_channel

Role: TypeAlias = "types_pb2.Role.ValueType"  # quoted: it is in the type stubs only
SERVICES: dict[Role, str] = {
    types_pb2.ROLE_PREFILL: "kvrelay.v1.Prefill",
    types_pb2.ROLE_DECODE: "kvrelay.v1.Decode",
}


class KnownWorker:
    """``problem`` is why it is not used, ``None`` while it is; only the registry changes it."""

    def __init__(self, address: str, role: Role, options: ChannelOptions) -> None:
        self.address = address
        self.role = role
        self.channel = open_channel(address, options)
        self.control = worker_pb2_grpc.WorkerStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)
        self.info: worker_pb2.WorkerInfo | None = None
        self.problem: KvrelayError | None = Unavailable("it was not asked yet")
        self._legs = 0
        self._tokens = 0

    @property
    def usable(self) -> bool:
        """Whether it may be given legs."""
        return self.problem is None and self.info is not None

    @property
    def key(self) -> str:
        """Its boot token; its address until it told one."""
        return self.info.worker if self.info is not None else self.address

    @contextmanager
    def occupied(self, tokens: int) -> Iterator[None]:
        """Counts a leg of so many tokens as being there."""
        self._legs += 1
        self._tokens += tokens
        try:
            yield
        finally:
            self._legs -= 1
            self._tokens -= tokens

    def candidate(self) -> Candidate:
        """What the policy needs to know. Only of a worker that told its ``info``."""
        info = self.info or worker_pb2.WorkerInfo()
        return Candidate(
            key=self.key,
            legs=self._legs,
            tokens=self._tokens,
            max_model_len=info.max_model_len,
            capacity=info.num_blocks * info.namespace.block_size,
        )

    def status(self) -> router_pb2.WorkerStatus:
        """For ``ListWorkers``."""
        return router_pb2.WorkerStatus(
            address=self.address,
            info=self.info,
            healthy=self.usable,
            reason="" if self.problem is None else str(self.problem),
            in_flight=self._legs,
        )
