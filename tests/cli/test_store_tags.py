"""``kvrelay store verify`` where blocks are signed: which fleet wrote each of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvrelay.block.mac import BlockKey
from kvrelay.cluster import endpoints
from kvrelay.rpc.security import policy
from kvstore import connect
from kvstore.client import remote
from tests.cli.rig import run
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.redis.redisserver import Server, running
from tests.kvstore.rig import TIMEOUT, make, name_of, put, sealed

pytestmark = pytest.mark.cluster

FLEET = "the-fleet-key-of-the-test"
TOKEN = "the-cluster-token-of-the-test"
KEY = BlockKey(hashlib.sha256(FLEET.encode()).digest())


@pytest.fixture(autouse=True)
def own_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands install credentials in this process; here they go when the test ends."""
    monkeypatch.setattr(remote, "RECHECK_SECONDS", TIMEOUT)
    before = policy.installed()
    yield
    policy._installed = before


@pytest.fixture(params=["kvrelay", "redis"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A store that anyone may write to; the service has the fleet's key."""
    if request.param == "redis":
        with running(server := Server(tmp_path)):
            yield f"redis://{server.address}"
        return
    with monkeypatch.context() as patch:
        patch.setenv("KVRELAY_FLEET_KEY", FLEET)
        process, url = start_service("--budget=16MiB")
    yield url
    stop(process)


def test_blocks_of_another_writer_are_counted_named_and_taken_out(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sealed(make(3000), KEY)
    wrong = [make(3000), sealed(make(3000), BlockKey(b"s" * 32))]
    with closing(connect(url)) as store:
        put(store, right, *wrong)
    status, out, _ = run(capsys, "verify", "--store", url)
    assert (status, "0 wrong" in out, "tags not checked" in out) == (0, True, True)

    monkeypatch.setenv("KVRELAY_FLEET_KEY", FLEET)
    status, out, _ = run(capsys, "verify", "--store", url, "--no-tags")
    assert (status, "0 wrong" in out, "tags not checked" in out) == (0, True, True)
    status, out, _ = run(capsys, "verify", "--store", url)
    assert (status, "2 wrong, 2 of them by their tag" in out) == (1, True)
    assert all(name_of(block).hex()[:12] in out for block in wrong)

    status, out, _ = run(capsys, "verify", "--store", url, "--repair", "--json")
    (found,) = json.loads(out)
    assert (status, found["tags_checked"], found["wrong_tags"]) == (0, True, 2)
    assert {(one["name"], one["error"], one["removed"]) for one in found["wrong"]} == {
        (name_of(block).hex(), "tag: the block was not written by this fleet", True)
        for block in wrong
    }
    status, out, _ = run(capsys, "verify", "--store", url)
    assert (status, "1 blocks" in out, "0 wrong" in out) == (0, True, True)


def test_the_key_is_found_in_the_endpoints_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("KVRELAY_FLEET_KEY", FLEET)
        patch.setenv("KVRELAY_CLUSTER_TOKEN", TOKEN)
        process, url = start_service("--budget=16MiB")
    try:
        file = tmp_path / "endpoints.json"
        endpoints.write(file, {"store": url, "token": TOKEN, "fleet_key": FLEET})
        assert run(capsys, "verify", "--endpoints", str(file))[0] == 0
        with closing(connect(url)) as store:
            put(store, sealed(make(300), KEY), make(300))
        status, out, _ = run(capsys, "verify", "--endpoints", str(file), "--repair")
        assert (status, "1 of them by their tag, 1 of them removed" in out) == (0, True)
    finally:
        stop(process)
