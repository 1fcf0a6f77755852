"""Stores of every URL kind, each test with an empty one; the service as a real process."""

from __future__ import annotations

import itertools
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest

from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cluster.ports import ReservedPorts, WantedPort, free_ports
from kvrelay.rpc import reserved
from kvrelay.rpc.address import LOOPBACK, Address
from kvstore import Store, connect
from kvstore.breaker import CircuitBreaker
from kvstore.client.memory import MemoryStore, forget
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.multi.backend import StoreBackend
from kvstore.multi.store import MultiStore
from tests.failures.proxy import Proxy
from tests.kvstore.redis.redisserver import Cluster, Server, running
from tests.kvstore.rig import PausedClock
from tests.secured import Files, write_files

BUDGET = 16 << 20
_NUMBERS = itertools.count()

CLEAR_SECONDS = 30.0
OURS = ("memory", "shm", "socket", "grpc", "several")
"""Stores that keep the books of their blocks themselves."""

REDIS = ("redis", "unix", "rediss", "cluster")
"""Stores that leave them to Redis, which knows of no leases and evicts by itself."""

ours_only = pytest.mark.parametrize("connecting", OURS, indirect=True)
"""For what Redis cannot promise; what holds there instead stands in ``test_redis.py``."""

Connect = Callable[[], Store]


def start_service(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL, once it said that it is ready."""
    command = [sys.executable, "-m", "kvstore", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, ready(process)


def ready(process: subprocess.Popen[str]) -> str:
    """The URL of a service, once it says that it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("store ready at "), line
    return "kvrelay://" + line.split()[3].rstrip(",")


@contextmanager
def kept_port() -> Iterator[str]:
    """The flag for the port of a service; nobody takes the port between two of its starts."""
    (port,) = free_ports(1)
    address = Address(LOOPBACK, port)
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(ReservedPorts([WantedPort(LOOPBACK, port)])),
    ):
        for name, value in reserved.variable([address]).items():
            patch.setenv(name, value)
        yield f"--port={port}"


@pytest.fixture
def port_flag() -> Iterator[str]:
    with kept_port() as flag:
        yield flag


def stop(process: subprocess.Popen[str]) -> None:
    """Ends it and closes its pipe."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="session")
def service_url() -> Iterator[str]:
    process, url = start_service(
        f"--budget={BUDGET}", "--max-block=8MiB", "--partial-life=60", "--ticket-life=4"
    )
    yield url
    stop(process)


@pytest.fixture(params=TRANSPORTS)
def plain_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """One whose blocks go in order of use: the default goes by what it has learned."""
    process, url = start_service(f"--budget={BUDGET}", "--max-block=8MiB", "--eviction=lru")
    try:
        store = connect(f"{url}?transport={request.param}")
        yield store
        store.close()
    finally:
        stop(process)


@pytest.fixture
def breaker_clock(monkeypatch: pytest.MonkeyPatch) -> PausedClock:
    """That of the circuit breakers of Redis stores that are opened after it."""
    clock = PausedClock()
    breaker = partial(CircuitBreaker, clock=clock)
    monkeypatch.setattr("kvstore.redis.server.CircuitBreaker", breaker)
    return clock


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with running(cluster):
        yield cluster


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of the server and of the client."""
    return write_files(tmp_path_factory.mktemp("tls"), "redis", CertificateAuthority())


@pytest.fixture(scope="session")
def redis_by_tls(redis_server: Server, certificates: Files) -> Iterator[str]:
    """The URL of the session's server behind TLS, which the one of a wheel cannot do itself."""
    with Proxy(redis_server.address, tls=serving(certificates)) as proxy:
        yield f"rediss://{proxy.address}?ca={certificates.ca}"


def serving(files: Files, mutual: bool = False) -> ssl.SSLContext:
    """What a server with these files is set up with."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
    return context


def url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """Of the session's store of a kind."""
    if kind in ("redis", "unix"):
        server = request.getfixturevalue("redis_server")
        return f"redis://{server.address}" if kind == "redis" else f"unix://{server.socket}"
    if kind == "rediss":
        return str(request.getfixturevalue("redis_by_tls"))
    if kind == "cluster":
        return f"redis+cluster://{request.getfixturevalue('redis_cluster').addresses}"
    return f"{request.getfixturevalue('service_url')}?transport={kind}"


@pytest.fixture(params=[*OURS, *REDIS])
def connecting(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes stores that share their blocks, as two clients of one service do."""
    stores: list[Store] = []
    name = f"test-{next(_NUMBERS)}"
    kind = "shm" if request.param == "several" else request.param
    url = None if kind == "memory" else url_of(kind, request)

    def one() -> Store:
        return MemoryStore(name, BUDGET) if url is None else connect(url)

    def two() -> Store:
        return MultiStore(
            [StoreBackend("near", one()), StoreBackend("far", MemoryStore(name, BUDGET))]
        )

    def make() -> Store:
        stores.append(two() if request.param == "several" else one())
        return stores[-1]

    first = make()
    first.clear(CLEAR_SECONDS)
    yield make
    for store in stores:
        store.close()
    forget(name)


@pytest.fixture
def store(connecting: Connect) -> Store:
    return connecting()
