"""The cluster that is fuzzed, what its processes hold, and the requests that go on beside it."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvrelay import AsyncClient
from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster
from kvrelay.engine.model.packed_linear import KERNEL_CACHES
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvrelay.v1 import store_pb2, store_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.cluster.processes import free_beside
from tests.models import tiny_model
from tests.secured import ADMIN, BOB, SERVICE, Files, write_credentials, write_files

SECONDS = 600.0  # of a request beside a flood, on a machine with little processor time to spare
PROMPTS = [[(number * 31 + index * 7) % 250 for index in range(40 + number)] for number in range(4)]


@dataclass(slots=True)
class Stand:
    """A running cluster with credentials; its connections are plain, or mutual TLS by ``files``."""

    cluster: Cluster
    metrics: dict[str, str]
    files: Files | None = None
    lines: list[str] = field(default_factory=list)

    def options(self, token: str) -> ChannelOptions:
        files = self.files
        given = SecurityOptions(token=token) if files is None else files.options(token=token)
        return ChannelOptions(security=policy.load(given))

    def tls(self) -> ssl.SSLContext | None:
        """Options of a peer with a certificate of this cluster."""
        if self.files is None:
            return None
        context = ssl.create_default_context(cafile=self.files.ca)
        context.load_cert_chain(self.files.cert, self.files.key)
        context.set_alpn_protocols(["h2"])
        return context

    def transports(self) -> store_pb2.GetTransportsResponse:
        """The store's transports."""
        with open_sync_channel(self.address("store"), self.options(SERVICE)) as channel:
            return store_pb2_grpc.StoreServiceStub(channel).GetTransports(
                store_pb2.GetTransportsRequest(), timeout=SECONDS
            )

    def grant(self, name: bytes) -> store_pb2.ReserveResponse:
        """A reservation for a block, with its proof for the socket transport."""
        request = store_pb2.ReserveRequest(claims=[store_pb2.Claim(name=name, length=4096)])
        with open_sync_channel(self.address("store"), self.options(SERVICE)) as channel:
            return store_pb2_grpc.StoreServiceStub(channel).Reserve(request, timeout=SECONDS)

    def address(self, role: str) -> str:
        return self.cluster.addresses(role)[0]

    @property
    def http(self) -> str:
        """HOST:PORT of the HTTP door."""
        assert self.cluster.http is not None
        return self.cluster.http.rpartition("/")[2]

    def pids(self) -> dict[str, int | None]:
        return {spec.name: self.cluster.named(spec.name).pid for spec in self.cluster.specs}

    def memory(self) -> dict[str, int]:
        """MiB of each process that are its own."""
        found = {}
        for name, pid in self.pids().items():
            status = Path(f"/proc/{pid}/status").read_text()
            anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
            assert anonymous is not None
            found[name] = int(anonymous[1]) >> 10
        return found

    def findings(self) -> list[str]:
        """Audit findings of the workers, and what they still hold."""
        found = []
        for role in ("prefill", "decode"):
            with open_sync_channel(self.address(role), self.options(ADMIN)) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                audit = stub.Audit(worker_pb2.AuditRequest(), timeout=SECONDS)
                load = stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=SECONDS).load
            found += [f"{role}: {one.invariant} {one.message}" for one in audit.findings]
            if held := (load.running, load.waiting, load.loading, load.held_blocks, load.saving):
                found += [f"{role}: still holds {held}"] if any(held) else []
        return found


@contextmanager
def standing(folder: Path, tls: bool = False) -> Iterator[Stand]:
    """One worker of each role. What ends is not started again."""
    tokens = write_credentials(folder)
    files = write_files(folder, "cluster", CertificateAuthority()) if tls else None
    model = tiny_model("llama", folder / "llama", eos_token_id=None)
    roles = ("router", "prefill", "decode")
    metrics: dict[str, str] = {}

    def layout(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
        specs = process_specs(config)
        free = free_beside(specs, len(roles))
        metrics.update({role: f"127.0.0.1:{port}" for role, port in zip(roles, free, strict=True)})
        return tuple(_told(spec, metrics) for spec in specs)

    config = ClusterConfig(
        model=str(model),
        port=0,
        http_port=0,
        dtype="float32",
        disaggregate="always",
        threads=1,
        store_budget=1 << 26,
        num_blocks=512,
        max_num_seqs=16,
        credentials=tokens,
        tls_cert=None if files is None else files.cert,
        tls_key=None if files is None else files.key,
        tls_ca=None if files is None else files.ca,
    )
    lines: list[str] = []
    cluster = Cluster(
        config,
        on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"),
        backoff=None,
        layout=layout,
    )
    try:
        with cluster:
            yield Stand(cluster, metrics, files, lines)
    finally:
        print("\n".join(lines[-20:]))


def tracebacks(lines: Sequence[str]) -> Counter[str]:
    """Every different one that a process wrote, whole, and how often."""
    found, open_ones, margins = Counter[str](), dict[str, list[str]](), dict[str, str]()
    for line in lines:
        name, _, text = line.partition("| ")
        margin = text[: len(text) - len(text.lstrip())]
        if text.strip().startswith("Traceback"):
            open_ones[name] = [f"{name}: {text}"]
            margins[name] = margin
        elif name in open_ones:
            open_ones[name].append(text)
            if margin == margins[name]:  # the error itself
                found[re.sub(r"0x[0-9a-f]+", "0x...", "\n".join(open_ones.pop(name)))] += 1
    return found


def _told(spec: ProcessSpec, metrics: dict[str, str]) -> ProcessSpec:
    environ = {**spec.environ, "KVRELAY_HEALTH_TIMEOUT": "20", "KVRELAY_HANDOFF_WAIT": "30"}
    environ |= dict.fromkeys(KERNEL_CACHES, "16")  # full soon: they would hide 100 MiB of growth
    args = spec.args
    if spec.role in metrics:
        args = (*args, "--metrics-port", metrics[spec.role].rsplit(":", 1)[1])
    return replace(spec, args=args, environ=environ)


class Witness:
    """Asks the same few things over and over; ``rounds`` counts those answered as before."""

    def __init__(self, stand: Stand) -> None:
        self._client = AsyncClient(stand.cluster.router, stand.options(BOB))
        self._told: list[Sequence[int]] = []
        self.rounds = 0

    async def begin(self) -> None:
        """The answers of an undisturbed cluster."""
        self._told = [await self._ask(number) for number in range(len(PROMPTS))]

    async def go_on(self, until: asyncio.Event) -> None:
        """Runs until stopped; raises if an answer differs or does not come."""
        try:
            while not until.is_set():
                number = self.rounds % len(PROMPTS)
                assert await self._ask(number) == self._told[number]
                self.rounds += 1
        finally:
            await self._client.close()

    async def _ask(self, number: int) -> Sequence[int]:
        done = await self._client.complete(
            timeout=SECONDS,
            token_ids=PROMPTS[number],
            max_tokens=12,
            ignore_eos=True,
            temperature=0.0 if number % 2 else 0.8,
            seed=7,
        )
        return done.token_ids
