"""What this machine offers kvrelay: findings, each with its consequence.

Changes nothing. A finding is ``ok``, ``absent`` (useful, but not here) or ``missing`` (needed, but
not here).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import grpc

from kvrelay.cluster.ports import is_free
from kvrelay.config.values import show_size
from kvrelay.errors import Rejected
from kvrelay.installation import (
    CLUSTER,
    EXTRAS,
    PURPOSES,
    hidden,
    install_line,
    missing,
    services_installed,
)
from kvrelay.process.cores import MOST_THREADS, available_cores
from kvrelay.process.memory import host_memory
from kvrelay.process.tempdir import ensure_temporary_directory
from kvrelay.rpc.address import LOOPBACK, ROUTER_PORT, Address
from kvrelay.rpc.channel import ChannelOptions, open_sync_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

State = Literal["ok", "absent", "missing"]
VERSIONS = ("grpcio", "protobuf", "torch", "transformers", "tokenizers", "xxhash", "safetensors")
MEMORY_WANTED = 2 << 30
REDIS_PORT = 6379
AUDIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One check: its result and the consequence."""

    name: str
    state: State
    found: str
    means: str = ""


def examine() -> Iterator[Diagnosis]:
    """Every finding, in the order of a start."""
    yield _python()
    yield from _packages()
    why = hidden()
    if why is not None:
        yield Diagnosis("kvrelay's own", "missing", "hidden", why)
    elif not missing(*CLUSTER):
        yield from _cluster()
    yield _memory()
    yield _shared_memory()
    yield _temporary_directory()
    yield from _torch()
    yield _port()
    yield from _redis()


def audit(address: str) -> worker_pb2.AuditResponse:
    """The broken invariants in the accounting of a running worker."""
    Address.parse(address)  # gRPC would accept a name without a port, and a port modulo 65536
    with open_sync_channel(address, ChannelOptions()) as channel:
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.Audit(worker_pb2.AuditRequest(), timeout=AUDIT_SECONDS)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Rejected("audit", f"{address} is no prefill or decode worker") from error
            raise from_rpc_error(error) from error


def _python() -> Diagnosis:
    found = f"{platform.python_version()} ({sys.executable})"
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        return Diagnosis("python", "missing", found, "needs 3.11, 3.12, 3.13 or 3.14")
    return Diagnosis("python", "ok", found)


def _packages() -> Iterator[Diagnosis]:
    """The versions that matter most, and the extras. An extra that was never wanted is absent."""
    absent = missing(*EXTRAS)
    for name in VERSIONS:
        if name not in absent:
            # One without a version can be imported, which is all that is needed.
            yield Diagnosis(name, "ok", version_of(name) or "installed")
    broken = services_installed() and all(map(missing, CLUSTER))
    for extra, purpose in PURPOSES.items():
        if lacks := missing(extra):
            state: State = "missing" if broken and extra in CLUSTER else "absent"
            means = f"{purpose}: {install_line(extra)}"
            yield Diagnosis(f"[{extra}]", state, f"not installed: {', '.join(lacks)}", means)
        else:
            beside = "; vllm has a line of its own" if extra == "worker-vllm" else ""
            yield Diagnosis(f"[{extra}]", "ok", f"complete{beside}")


def version_of(package: str) -> str | None:
    """The version of an installed distribution; ``None`` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cluster() -> Iterator[Diagnosis]:
    """The cores and the shipped model."""
    from kvrelay.cluster.config import SHIPPED_MODEL  # needs the packages of the services

    found = f"{available_cores()} cores, {platform.system()} {platform.machine()}"
    yield Diagnosis(
        "processor", "ok", found, f"workers share them, each with at most {MOST_THREADS} threads"
    )
    weights = list(SHIPPED_MODEL.glob("*.safetensors"))
    if weights:
        size = sum(path.stat().st_size for path in weights)
        yield Diagnosis("shipped model", "ok", f"recall, {size / 1e6:.1f} MB")
    else:
        yield Diagnosis("shipped model", "missing", "no weights", "give --model DIR")


def _memory() -> Diagnosis:
    memory = host_memory()
    if memory is None:
        return Diagnosis("memory", "absent", "unknown here")
    state: State = "ok" if memory.free >= MEMORY_WANTED else "absent"
    means = (
        ""
        if state == "ok"
        else f"under {show_size(MEMORY_WANTED)}: lower --kv-memory and --store-budget"
    )
    return Diagnosis("memory", state, f"{memory.free / 2**30:.1f} GiB available", means)


def _shared_memory() -> Diagnosis:
    if not Path("/dev/shm").is_dir():
        return Diagnosis("shared memory", "absent", "no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    return Diagnosis("shared memory", "ok", f"{free / 2**30:.1f} GiB free in /dev/shm")


def _temporary_directory() -> Diagnosis:
    try:
        ensure_temporary_directory()
    except Rejected as error:
        return Diagnosis("temporary files", "missing", "nowhere to write them", str(error))
    return Diagnosis("temporary files", "ok", f"in {tempfile.gettempdir()}")


def _torch() -> Iterator[Diagnosis]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # of a library that it loads
        yield Diagnosis("devices", "missing", f"torch does not load: {error}", "install it again")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
        means = "workers will use cuda, which has not been tried on a GPU yet, or --device cpu"
        yield Diagnosis("devices", "ok", names, means)
    else:
        built = torch.version.cuda
        why = f"built for CUDA {built}, no device seen" if built else "built for the CPU only"
        yield Diagnosis("devices", "absent", f"no GPU ({why})", "workers will use the CPU")
    if missing("worker"):
        return  # a client beside a torch of other programs
    flash = importlib.util.find_spec("flash_attn") is not None
    means = "used where the native kernel is not"
    if flash:
        means += "; flash_attn is installed: --attention-backend flash_attn on a GPU"
    yield Diagnosis("attention", "ok", "sdpa, of torch", means)
    yield _native_attention()
    yield from _openmp()
    yield from _products()
    from kvrelay.engine.kernels import kernels

    profile = "/".join(kernels(torch.device("cuda" if count else "cpu")))
    means = "workers with equal numeric profiles share KV blocks and streams"
    yield Diagnosis("numerics", "ok", profile, means)


def _native_attention() -> Diagnosis:
    """Whether the compiled kernel is here and passes its self-test."""
    from kvrelay.engine.attention.native.library import NoKernel, load_kernel

    try:
        found = load_kernel().summary
    except Rejected as error:
        means = "workers on the CPU refuse to start, except with --attention-backend sdpa"
        return Diagnosis("native kernel", "absent", str(error), means)
    except NoKernel as error:
        means = "workers compute attention with sdpa"
        return Diagnosis("native kernel", "absent", str(error), means)
    return Diagnosis("native kernel", "ok", found, "workers on the CPU compute attention with it")


def _openmp() -> Iterator[Diagnosis]:
    """Variables with which products of oneDNN would be wrong."""
    from kvrelay.engine.attention.native.library import check_openmp

    try:
        check_openmp(available_cores())
    except Rejected as error:
        means = "workers on the CPU that need more threads refuse to start"
        yield Diagnosis("openmp", "absent", str(error), means)


def _products() -> Iterator[Diagnosis]:
    """What multiplies each dtype on the CPU."""
    from kvrelay.engine.attention.native.library import MULTIPLIED, products_of
    from kvrelay.engine.attention.native.products import Products

    for dtype in MULTIPLIED:
        name = str(dtype).removeprefix("torch.")
        try:
            found = products_of(dtype)
        except Rejected as error:
            yield Diagnosis(name, "absent", str(error), f"workers in {name} refuse to start")
            continue
        if isinstance(found, Products):
            yield Diagnosis(name, "ok", found.summary, "workers on the CPU multiply with it")
        else:
            state: State = "absent" if found.notable else "ok"
            yield Diagnosis(name, state, found.reason, "workers on the CPU multiply with oneDNN")


def _port() -> Diagnosis:
    if is_free(ROUTER_PORT):
        return Diagnosis("router port", "ok", f"{ROUTER_PORT} is free")
    return Diagnosis(
        "router port", "absent", f"{ROUTER_PORT} is taken", "choose another with --port"
    )


def _redis() -> Iterator[Diagnosis]:
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        yield Diagnosis(
            "redis server", "absent", "none on PATH", "not needed: kvrelay has a store of its own"
        )
    else:
        yield Diagnosis("redis server", "ok", _first_line([server, "--version"]) or server)
    if is_free(REDIS_PORT):
        found = f"nothing listens on {Address(LOOPBACK, REDIS_PORT)}"
        yield Diagnosis("redis", "absent", found, "not needed")
    else:
        yield Diagnosis("redis", "ok", f"something listens on {REDIS_PORT}")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0][:60] if done.stdout else ""
