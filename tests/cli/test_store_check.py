"""``kvrelay doctor --store``: its findings, for Redis above all; and secrets in a URL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.doctor import command
from kvrelay.cli.doctor.machine import Diagnosis
from kvrelay.cli.doctor.stores import check_stores
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.redis.redisserver import Cluster, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    with running(server):
        yield server


def said(url: str) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in check_stores(url)}


def test_a_server_that_is_set_up_well(server: Server) -> None:
    name = f"redis {server.address}"
    found = said(f"redis://{server.address}")
    assert [finding.state for finding in found.values()] == ["ok", "ok"]
    with server.client() as client:
        assert f"version {client.info('server')['redis_version']}" in found[name].found
    assert found[f"{name} memory"].found == "maxmemory 64MiB, maxmemory-policy allkeys-lru"
    assert said(f"unix://{server.socket}")[f"redis unix:{server.socket}"].state == "ok"


def test_a_server_that_would_fill_up_is_told_how_not_to(server: Server) -> None:
    with server.client() as client:
        try:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 0)
            memory = said(f"redis://{server.address}")[f"redis {server.address} memory"]
        finally:
            client.config_set("maxmemory", "64mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
    assert memory.state == "absent"
    assert "CONFIG SET maxmemory;" in memory.means
    assert "CONFIG SET maxmemory-policy allkeys-lru" in memory.means


def test_a_list_is_checked_as_a_list(server: Server) -> None:
    found = said(f"memory://,redis://{server.address}?promote=yes&write=no")
    assert [finding.state for finding in found.values()] == ["ok"] * 3
    for text in ("redis://[::1", "memory://a,redis://h?slow=yes", "memory://a,memory://a"):
        assert [finding.state for finding in said(text).values()] == ["missing"]


def test_a_replica_is_no_store(server: Server) -> None:
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", 1)
        try:
            role = said(f"redis://{server.address}")[f"redis {server.address} role"]
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
    assert (role.state, role.found) == ("missing", "is a replica")


def test_a_store_that_is_not_there_is_missing(server: Server) -> None:
    process, url = start_service("--budget=1MiB")
    try:
        assert said(url)[f"store {url}"].state == "ok"
    finally:
        stop(process)
    found = said(f"{url},redis://me:hush@127.0.0.1:1,redis://{server.address}")
    states = {name: finding.state for name, finding in found.items()}
    assert states == {
        f"store {url}": "missing",
        "redis 127.0.0.1:1": "missing",
        f"redis {server.address}": "ok",
        f"redis {server.address} memory": "ok",
    }
    assert "hush" not in str(found)
    wrong = said("redis://me:hush@a?life=x")
    assert [finding.state for finding in wrong.values()] == ["missing"]
    assert "hush" not in str(wrong)


def test_a_cluster_and_what_it_does_when_one_is_gone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with running(cluster):
        first, second, third = cluster.servers
        url = f"redis+cluster://{first.address}"
        names = [f"redis {one.address}{part}" for one in cluster.servers for part in PARTS]
        assert {name: f.state for name, f in said(url).items()} == dict.fromkeys(names, "ok")
        with second.client() as client:
            client.config_set("cluster-require-full-coverage", "yes")
        coverage = said(url)[f"redis {second.address} cluster"]
        assert coverage.state == "absent"
        assert "CONFIG SET cluster-require-full-coverage no" in coverage.means
        with first.client() as client:
            client.execute_command("ACL SETUSER", "few", "on", ">few", "+@all", "-config", "~*")
        unknown = said(f"redis+cluster://few:few@{first.address}")
        assert unknown[f"redis {first.address} cluster"].found.endswith("unknown")
        single = said(f"redis://{first.address}")[f"redis {first.address} cluster"]
        assert single.state == "missing"
        assert "redis+cluster://" in single.means
        third.kill()
        gone = said(url)
        assert gone[f"redis {third.address}"].state == "absent"
        assert "not reachable" in gone[f"redis {third.address}"].found
        assert gone[f"redis {first.address}"].state == "ok"


PARTS = ("", " memory", " cluster")


def test_the_command_shows_it(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--store", f"redis://{server.address}"])
    shown = capsys.readouterr().out
    assert f"redis {server.address}" in shown
    assert "allkeys-lru" in shown


def test_a_password_in_a_url_is_on_no_command_line() -> None:
    """``kvrelay up --store``: every user can read a process's command line."""
    url = "redis://me:hush@127.0.0.1:1"
    made = process_specs(ClusterConfig(store=url, port=0))
    assert {spec.role for spec in made} == {"prefill", "decode", "router"}, "no store of its own"
    assert "hush" not in str([spec.args for spec in made])
    assert "hush" not in repr(made)
    workers = [spec for spec in made if spec.role != "router"]
    assert all(spec.environ["KVRELAY_STORE"] == url for spec in workers)
    plain = process_specs(ClusterConfig(store="redis://127.0.0.1:1", port=0))
    assert all("redis://127.0.0.1:1" in spec.args for spec in plain if spec.role != "router")
    assert os.environ.get("KVRELAY_STORE") is None
