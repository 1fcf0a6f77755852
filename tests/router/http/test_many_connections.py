"""A real router under thousands of connections that want nothing, or too much."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx2
import pytest

from benchmarks.random_model import make_model
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from kvrelay.v1 import store_pb2, store_pb2_grpc
from tests.exact.idle import check_idle
from tests.secured import OWN_HOST

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
IDLE = 2000
FLOODS = 100  # of each other kind, at once
FILES = 8192
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY: dict[str, object] = {
    "prompt": list(range(40)),
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}
KINDS = {
    "nothing": b"",
    "a head that does not end": HEAD + b"x: ",
    "a flood of fields": HEAD + b"a: b\r\n" * 10_000,
    "one long field": HEAD + b"x: " + b"y" * 200_000,
    "a slow body": HEAD + b'content-length: 4000\r\n\r\n{"prompt": "',
    "a body in chunks without an end": HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    "a body larger than any": HEAD + b"content-length: 99999999999\r\n\r\n" + b"x" * 100_000,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard < 0 else min(FILES, hard)
    if wanted < 2 * IDLE:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    model: Path = make_model("llama-tiny", tmp_path_factory.mktemp("model"), "float32")
    config = ClusterConfig(
        model=str(model),
        host=OWN_HOST,
        port=0,
        http_port=0,
        num_blocks=256,
        store_budget=64 << 20,
        threads=1,
    )
    try:
        with Cluster(config) as made:
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files(cluster: Cluster) -> list[Path]:
    """Of the router's process."""
    return list(Path(f"/proc/{cluster.process('router').pid}/fd").iterdir())


def described(files: list[Path]) -> list[str]:
    """What the files are; of a connection its addresses and state, as /proc/net has them."""
    tables = [Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()]
    lines = [line.split() for table in tables for line in table.splitlines()]
    connections = {f"socket:[{line[9]}]": " ".join(line[1:4]) for line in lines}
    links: list[str] = []
    for file in files:
        with suppress(FileNotFoundError):
            links.append(str(file.readlink()))
    return [connections.get(link, link) for link in links]


async def opened(port: int, sent: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(OWN_HOST, port)
    with suppress(OSError):
        writer.write(sent)
    return writer


async def answered(url: str, expected: object) -> float:
    """A new client is served as before; the seconds that it took."""
    began = time.monotonic()
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        made = await client.post("/v1/completions", json=BODY)
        assert made.status_code == 200, made.text
        assert made.json()["choices"] == expected
        assert (await client.get("/health")).status_code == 200
    return time.monotonic() - began


async def hinted(client: httpx2.AsyncClient, cluster: Cluster) -> None:
    """Wait until the router has told its store something, over a connection that it keeps."""
    async with grpc.aio.insecure_channel(cluster.addresses("store")[0]) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        request = store_pb2.GetStatsRequest()
        async with asyncio.timeout(60):
            while not (await stub.GetStats(request)).hints_received:
                await client.post("/v1/completions", json={**BODY, "retention": "turn_ends"})
                await asyncio.sleep(2)


async def test_new_clients_are_served_and_nothing_is_held(cluster: Cluster) -> None:
    assert cluster.http is not None
    port = int(cluster.http.rsplit(":", 1)[1])
    async with httpx2.AsyncClient(base_url=cluster.http, timeout=60) as client:
        made = await client.post("/v1/completions", json=BODY)
        assert made.status_code == 200, json.dumps(made.text)
        expected = made.json()["choices"]
        # The router connects to the store for its first hint: not while its files are counted.
        await hinted(client, cluster)
    alone = await answered(cluster.http, expected)
    await asyncio.sleep(1)  # the router closes what this client has left
    before = open_files(cluster)
    known = described(before)
    writers: list[asyncio.StreamWriter] = []
    took: dict[str, float] = {}
    try:
        for _ in range(IDLE // FLOODS):
            writers += await asyncio.gather(*(opened(port, b"") for _ in range(FLOODS)))
        took["idle"] = await answered(cluster.http, expected)
        # Half of the host's places: the others are for connections that do something.
        assert len(before) < len(open_files(cluster)) <= len(before) + 1100
        for kind, sent in KINDS.items():
            writers += await asyncio.gather(*(opened(port, sent) for _ in range(FLOODS)))
            took[kind] = await answered(cluster.http, expected)
    finally:
        for writer in writers:
            writer.transport.abort()
    print(f"alone {alone:.3f} s", {kind: round(seconds, 3) for kind, seconds in took.items()})
    deadline = time.monotonic() + 60
    while len(left := open_files(cluster)) > len(before):
        assert time.monotonic() < deadline, [one for one in described(left) if one not in known]
        await asyncio.sleep(0.1)
    check_idle(cluster, 15.0)
    assert await answered(cluster.http, expected) > 0
