"""Whether a cluster is ready: the health of each process, then the router's view of its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2

from kvrelay.cluster.process import ProcessSpec
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.security.policy import Security
from kvrelay.v1 import router_pb2, router_pb2_grpc

ASK_SECONDS = 2.0
RECONNECT_SECONDS = 0.2


class ReadinessProbe:
    """Probes a cluster that starts; ``close`` it, because it holds connections."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        on_ready: Callable[[ProcessSpec, str], None],
        security: Security | None = None,
    ) -> None:
        self._since = time.monotonic()
        self._on_ready = on_ready
        self._waiting = {(spec.role, spec.index): spec for spec in specs}
        self._routers = [spec for spec in specs if spec.role == "router"]
        options = ChannelOptions(max_reconnect_seconds=RECONNECT_SECONDS, security=security)
        self._channels = {spec.name: open_sync_channel(spec.address, options) for spec in specs}
        self._view: router_pb2.ListWorkersResponse | None = None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def done(self) -> bool:
        """Whether every process serves and every router uses every worker."""
        return not self._waiting and (not self._routers or self._all_healthy())

    def served(self, role: str, index: int) -> bool:
        return (role, index) not in self._waiting

    def step(self, seconds: float) -> None:
        """Probe every process that is not ready yet, for about ``seconds`` at most."""
        calls = [(key, spec, self._ask(spec, seconds)) for key, spec in self._waiting.items()]
        for key, spec, call in calls:
            if _says_serving(call):
                del self._waiting[key]
                self._on_ready(spec, f"ready after {time.monotonic() - self._since:.1f} s")
        if not self._waiting and self._routers:
            self._ask_router()
            if not self._all_healthy():
                time.sleep(min(seconds, 0.05))

    def workers(self) -> router_pb2.ListWorkersResponse:
        return self._view or router_pb2.ListWorkersResponse()

    def missing(self) -> str:
        """The processes that are not ready, and why."""
        names = [f"{spec.name} ({spec.address})" for spec in self._waiting.values()]
        view = self.workers().workers
        names += [f"{one.address}: {one.reason or 'unknown'}" for one in view if not one.healthy]
        return ", ".join(names) or "the router knows no worker yet"

    def _ask(
        self, spec: ProcessSpec, seconds: float
    ) -> grpc.Future[health_pb2.HealthCheckResponse]:
        check = self._channels[spec.name].unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return check.future(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)

    def _ask_router(self) -> None:
        stub = router_pb2_grpc.RouterServiceStub(self._channels[self._routers[0].name])
        try:
            self._view = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=ASK_SECONDS)
        except grpc.RpcError:
            self._view = None  # retried until the deadline, whose error names what is missing

    def _all_healthy(self) -> bool:
        view = self.workers().workers
        return bool(view) and all(worker.healthy for worker in view)


def _says_serving(call: grpc.Future[health_pb2.HealthCheckResponse]) -> bool:
    try:
        return bool(call.result().status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False
