"""A small cluster whose workers reach the store through fault proxies, and their reported loads.

Chunks are small and few requests run at once, so that every stage of a request lasts long enough to
be observed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.process import ProcessSpec, RestartBackoff
from kvrelay.cluster.supervisor import Cluster
from kvrelay.v1 import store_pb2, store_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.failures.held import GATE, Gate
from tests.failures.proxy import Proxy
from tests.forked import all_forked

BLOCK = 16
SEQS = 2
BACKOFF = RestartBackoff(first=0.05, longest=0.2)
ROLES = ("prefill", "decode")
HELD = "tests.failures.held"


@dataclass(frozen=True, slots=True)
class Seen:
    """The load of one worker at a moment."""

    role: str
    index: int
    load: worker_pb2.WorkerLoad


class Rig:
    """The cluster, and the proxies between the workers of each role and the store.

    ``gate``: of workers that can be held.
    """

    def __init__(
        self,
        cluster: Cluster,
        proxies: dict[str, Proxy],
        model: Path,
        lines: list[str],
        gate: Gate,
    ) -> None:
        self.cluster = cluster
        self.gate = gate
        self.proxies = proxies
        self.model = model
        self.lines = lines  # output of all processes so far

    def heal(self) -> None:
        """All proxies pass everything, and no worker is held."""
        self.gate.open()
        for proxy in self.proxies.values():
            proxy.heal()

    def restart(self, role: str) -> None:
        """Restart every worker of a role, so that its pool is empty."""
        for index in range(len(self.cluster.addresses(role))):
            self.cluster.kill(role, index)
        self.settle()

    def settle(self) -> None:
        """Wait until every process serves again."""
        self.cluster.wait()

    def store_stats(self) -> store_pb2.GetStatsResponse:
        """The counters of the store."""
        address = self.cluster.addresses("store")[0]
        with grpc.insecure_channel(address) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            return stub.GetStats(store_pb2.GetStatsRequest(), timeout=10.0)


class Observer:
    """Asks every worker for its load; a worker that does not answer is left out."""

    def __init__(self, rig: Rig) -> None:
        self._channels = {
            (role, index): grpc.aio.insecure_channel(address)
            for role in ROLES
            for index, address in enumerate(rig.cluster.addresses(role))
        }

    async def look(self) -> list[Seen]:
        """The loads of all workers, asked at once."""
        loads = await asyncio.gather(*(self._ask(*key) for key in self._channels))
        return [seen for seen in loads if seen is not None]

    async def _ask(self, role: str, index: int) -> Seen | None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels[role, index])
        try:
            answer = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=2.0)
            return Seen(role, index, answer.load)
        except grpc.RpcError:
            return None

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()


@contextmanager
def rig(
    model: Path,
    seqs: int = SEQS,
    links: bool = False,
    environ: Mapping[str, str] | None = None,
    prefill: int = 2,
    decode: int = 2,
    module: str | None = None,
    http: bool = False,
    otlp: str | None = None,
) -> Iterator[Rig]:
    """A running cluster; the last lines of all processes are printed at the end.

    With ``links`` the router reaches each worker through a proxy named as the worker is, such as
    ``decode-1``. ``module`` runs in place of the workers' own. ``environ`` are flags for all of its
    processes: ``{"max_deaths": "9"}``. ``otlp``: the collector of their spans. ``HELD`` as the
    ``module`` makes workers that the rig's gate can hold.
    """
    lines: list[str] = []
    config = ClusterConfig(
        model=str(model),
        port=0,
        http_port=0 if http else None,
        dtype="float32",
        prefill=prefill,
        decode=decode,
        block_size=BLOCK,
        num_blocks=128,
        max_num_seqs=seqs,
        max_num_batched_tokens=16,
        disaggregate="always",
        store_budget=1 << 26,
        otlp_endpoint=otlp,
        queue_seconds=600.0,  # a slow machine gets hundreds of requests at once
    )
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        gate = Gate(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "closed")
        patch.setenv(GATE, str(gate.path))
        patch.setenv("KVRELAY_AUDIT", "true")
        for name, value in (environ or {}).items():
            patch.setenv(f"KVRELAY_{name.upper()}", value)
        proxies: dict[str, Proxy] = {}

        def layout(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
            made = tuple(_another(spec, module) for spec in all_forked(process_specs(config)))
            store = next(spec for spec in made if spec.role == "store")
            for role in ROLES:
                proxies[role] = stack.enter_context(Proxy(store.address))
            for spec in made if links else ():
                if spec.role in ROLES:
                    proxies[spec.name] = stack.enter_context(Proxy(spec.address))
            proxied = {s.address: proxies[s.name].address for s in made if s.name in proxies}
            return tuple(_through(spec, store.address, proxies, proxied) for spec in made)

        def note(spec: ProcessSpec, line: str) -> None:
            lines.append(f"{spec.name}| {line}")

        try:
            up = stack.enter_context(
                Cluster(config, on_line=note, on_change=note, backoff=BACKOFF, layout=layout)
            )
            yield Rig(up, proxies, model, lines, gate)
        finally:
            print("\n".join(lines[-400:]))


def _another(spec: ProcessSpec, module: str | None) -> ProcessSpec:
    """The spec with ``module`` in place of a worker's own; its first argument is the role."""
    if module is None or spec.role not in ROLES:
        return spec
    return replace(spec, module=module, args=(spec.role, *spec.args))


def _through(
    spec: ProcessSpec, store: str, proxies: dict[str, Proxy], proxied: dict[str, str]
) -> ProcessSpec:
    """A worker that reaches the store through its role's proxy, by gRPC alone; or the router."""
    if spec.role == "router":
        return replace(spec, args=tuple(proxied.get(word, word) for word in spec.args))
    if spec.role not in proxies:
        return spec
    url = f"kvrelay://{proxies[spec.role].address}?transport=grpc"
    return replace(
        spec, args=tuple(url if word == f"kvrelay://{store}" else word for word in spec.args)
    )
