"""A cluster of ``kvrelay up`` and another user of the machine, who may generate and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvrelay import Client
from kvrelay.block.header import encode
from kvrelay.cli.dispatch import main
from kvrelay.cluster import endpoints
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports, is_free
from kvrelay.cluster.process import ProcessSpec
from kvrelay.cluster.supervisor import Cluster, wanted_ports, with_cluster_token
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from kvstore import connect
from kvstore.client.browse import browse
from kvstore.client.transports.selector import TRANSPORTS
from tests.cluster.processes import until
from tests.cluster.thief import Thief
from tests.exact.oracle import Oracle
from tests.models import tiny_model
from tests.secure.stranger import BLOCKS
from tests.secured import write_credentials

SECONDS = 60.0
FORGED = [[number, *range(100, 163)] for number in (7, 8, 9)]  # for each transport a prompt
ROLES = ("store", "prefill", "decode", "router")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_model("llama", folder / "llama", eos_token_id=None)


def config_of(model: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(model), port=0, dtype="float32", threads=1, store_budget=1 << 26, num_blocks=256
    )


@pytest.fixture
def own_policy() -> Iterator[None]:
    """Commands install credentials in this process; here they go when the test ends."""
    before = policy.installed()
    yield
    policy._installed = before


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with Cluster(with_cluster_token(config_of(model))) as running:
        yield running


@pytest.fixture
def published(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_policy: None
) -> Path:
    """The endpoints file in the private folder of this user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = endpoints.own_file()
    assert file is not None
    endpoints.write(file, cluster.describe())
    return file


def stranger(cluster: Cluster, *files: str, only: tuple[str, ...] = ("",)) -> dict[str, object]:
    """What became of the attempts of another user whose names begin with one of ``only``."""
    target = {role: cluster.addresses(role)[0] for role in ROLES} | {
        "files": files,
        "only": only,
        "like": header_of_a_block(cluster).hex(),
        "prompts": FORGED,
        "announced": "127.0.0.1:1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.secure.stranger"],
        cwd=ROOT,
        input=json.dumps(target),
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def header_of_a_block(cluster: Cluster) -> bytes:
    """The header of a full block that the cluster has stored for a prompt."""
    with Client(cluster.router) as client:
        client.complete(token_ids=list(range(1, 70)), max_tokens=2, timeout=SECONDS)
    with allowed(cluster), closing(browse(cluster.store)) as browser:
        whole = next(one for one in browser.list(SECONDS) if not one.partial)
        return encode(browser.inspect(whole.name, SECONDS)[1])


@contextmanager
def allowed(cluster: Cluster) -> Iterator[None]:
    """This process shows the cluster's token meanwhile."""
    before = policy.installed()
    policy.install(SecurityOptions(cluster_token=cluster.config.cluster_token))
    try:
        yield
    finally:
        policy._installed = before


def workers_of(cluster: Cluster) -> set[tuple[object, ...]]:
    """What another user must not change of the workers."""
    with Client(cluster.router) as client:
        workers = client.workers(SECONDS)
    return {(one.address, one.role, one.state, one.info) for one in workers}


def blocks_of(cluster: Cluster) -> set[bytes]:
    """The names of the store's blocks."""
    with allowed(cluster), closing(browse(cluster.store)) as browser:
        return {one.name for one in browser.list(SECONDS)}


def answer(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens after a prompt, and how many tokens of it were a cache hit."""
    with Client(cluster.router) as client:
        asked = client.complete(token_ids=prompt, max_tokens=8, temperature=0.0, timeout=SECONDS)
    assert asked.usage is not None
    assert asked.usage.cached_prompt_tokens is not None
    return list(asked.token_ids), asked.usage.cached_prompt_tokens


@pytest.mark.cluster
def test_calls_of_another_user_that_would_be_valid_change_nothing(
    cluster: Cluster, model: Path
) -> None:
    """Calls without a field are refused before one is read: these have all that an admin sends."""
    header_of_a_block(cluster)
    workers, blocks = workers_of(cluster), blocks_of(cluster)
    assert blocks
    seen = stranger(cluster, only=("forge", "valid"))
    codes = seen["valid"]
    assert isinstance(codes, dict)
    assert len(codes) == 14
    assert set(codes.values()) == {"UNAUTHENTICATED"}, codes
    for transport in TRANSPORTS:
        assert seen[f"forge {transport}"] == ["refused"]
    assert workers_of(cluster) == workers
    assert blocks <= blocks_of(cluster)
    oracle = Oracle(model)
    for prompt in FORGED:
        assert answer(cluster, prompt) == (oracle.greedy(prompt, 8), 0)


@pytest.mark.cluster
def test_without_a_token_those_calls_do_what_they_say(model: Path) -> None:
    """And yet no worker believes a block that another user has signed with a key of its own."""
    with Cluster(config_of(model)) as running:
        seen = stranger(running, only=("forge",))
        stored = 0
        for transport in TRANSPORTS:
            if not (seen["another user"] and transport == "shm"):
                assert seen[f"forge {transport}"] == ["stored"] * 4
                stored += 4
        assert stored >= 8
        oracle = Oracle(model)
        for prompt in FORGED:
            assert answer(running, prompt) == (oracle.greedy(prompt, 8), 0)
        seen = stranger(running, only=("valid",))
        codes = seen["valid"]
        assert isinstance(codes, dict)
        announced = {codes.pop(name) for name in list(codes) if name.startswith("announce")}
        assert announced == {"INVALID_ARGUMENT"}  # the router of kvrelay up takes none
        assert set(codes.values()) == {"OK"}, codes
        assert not blocks_of(running)


@pytest.mark.cluster
def test_another_user_may_generate_and_nothing_else(cluster: Cluster, published: Path) -> None:
    pids = [cluster.process(role, 0).pid for role in ROLES]
    private = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "fd")]
    seen = stranger(cluster, str(published), *private)
    for role in ROLES:
        codes = seen[role]
        assert isinstance(codes, dict)
        assert codes
        if role == "router":
            assert codes.pop("ListWorkers") == "OK"
            assert codes.pop("Generate") == "INVALID_ARGUMENT"  # the empty request was read
        assert set(codes.values()) == {"UNAUTHENTICATED"}, codes
    for transport in ("shm", "socket", "grpc"):
        assert seen[f"poison {transport}"] == {"refused": BLOCKS}
    if seen["another user"]:
        answers = seen["attach"]
        assert isinstance(answers, list)
        assert set(answers) == {"closed"}
        files = seen["files"]
        assert isinstance(files, dict)
        assert set(files.values()) == {"refused"}
    with Client(cluster.router) as client:
        asked = client.complete(token_ids=[1, 2, 3], max_tokens=3, timeout=SECONDS)
        assert len(asked.token_ids) == 3
        assert len(client.workers(SECONDS)) == 2


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_another_user_cannot_take_a_port_while_its_server_starts(model: Path) -> None:
    """The others would show the token there. It was possible in every start and restart."""
    begun = threading.Lock()

    def besiege(spec: ProcessSpec, line: str) -> None:
        if begun.acquire(blocking=False):  # at the first line of the first process
            thief.ask("besiege", ports)

    metrics = next(p for p in free_ports(99) if all(is_free(p + more) for more in range(4)))
    config = replace(config_of(model), metrics_port=metrics, http_port=0)
    with Thief() as thief:
        cluster = Cluster(with_cluster_token(config), on_line=besiege)
        ports = [wanted.port for wanted in wanted_ports(cluster.specs)]
        assert len(ports) == 10  # four of gRPC, four of metrics, of HTTP, of the socket transport
        with cluster:
            for role in ROLES:
                cluster.kill(role)
                until(partial(_restarted, cluster, role), f"{role} restarted", SECONDS)
                cluster.wait()
            assert thief.relent() == []
        assert thief.ask("steal", ports)  # nothing is reserved now


def _restarted(cluster: Cluster, role: str) -> bool:
    process = cluster.process(role)
    return process.starts == 2 and process.pid is not None


@pytest.mark.cluster
def test_without_a_token_the_same_user_poisons(model: Path) -> None:
    """The attempts above would succeed in a cluster that asks for no token."""
    with Cluster(config_of(model)) as running:
        seen = stranger(running)
    for transport in ("shm", "socket", "grpc"):
        if not (seen["another user"] and transport == "shm"):
            assert seen[f"poison {transport}"] == {"stored": BLOCKS}
    codes = seen["store"]
    assert isinstance(codes, dict)
    assert codes["Clear"] == codes["GetStats"] == "OK"


@pytest.mark.cluster
def test_commands_find_the_token(
    cluster: Cluster, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert published.stat().st_mode & 0o777 == 0o600
    assert published.parent.stat().st_mode & 0o777 == 0o700
    store, decode = cluster.store, cluster.addresses("decode")[0]
    assert main(["store", "clear", "--yes", "--store", store]) == 0
    assert main(["store", "stats", "--endpoints", str(published)]) == 0
    assert main(["doctor", "--audit", decode]) == 0
    capsys.readouterr()
    assert main(["store", "verify", "--store", store]) == 0
    assert "tags not checked" not in capsys.readouterr().out  # the fleet key is there too
    to_decode = ["role", "decode", "--worker", decode, "--router", cluster.router]
    assert main(to_decode) == 0
    published.unlink()
    capsys.readouterr()
    assert main(["store", "stats", "--store", store]) != 0
    assert "no token that this server knows" in capsys.readouterr().err
    published.write_text(json.dumps(cluster.describe() | {"token": "of another cluster"}))
    assert main(["doctor", "--audit", decode]) != 0


def test_a_token_of_ones_own_is_not_replaced(published: Path, cluster: Cluster) -> None:
    address = cluster.addresses("store")[0]
    for options in (SecurityOptions(token="x" * 20), SecurityOptions(credentials="file")):
        assert endpoints.authorized(options, None, address) == options
    options = endpoints.authorized(SecurityOptions(), None, address)
    assert options.cluster_token == cluster.config.cluster_token
    assert endpoints.authorized(SecurityOptions(), None, "127.0.0.1:1") == SecurityOptions()


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoints.own_file() is not None
    (tmp_path / "kvrelay").chmod(0o777)
    assert endpoints.own_file() is None
    (tmp_path / "kvrelay").rmdir()
    (tmp_path / "kvrelay").symlink_to(tmp_path)
    assert endpoints.own_file() is None


def test_the_token_stays_on_this_machine(own_policy: None) -> None:
    security = policy.load(SecurityOptions(cluster_token="of-the-cluster-of-the-test"))
    assert security.token_for("127.0.0.1:1") == "of-the-cluster-of-the-test"
    assert security.token_for("store.example.org:1") is None


def test_credentials_that_ask_for_tokens_are_enough(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    drawn = [with_cluster_token(config).cluster_token for _ in range(2)]
    assert len(set(drawn)) == 2
    given = write_credentials(tmp_path)
    asking = ClusterConfig(model=str(model), credentials=given)
    assert with_cluster_token(asking) == asking


@pytest.mark.cluster
def test_the_store_without_a_token_says_so(model: Path) -> None:
    lines: list[str] = []
    with (
        Cluster(config_of(model), on_line=lambda spec, line: lines.append(line)) as running,
        closing(connect(running.store)) as store,
    ):
        assert store.stats(SECONDS).entries == 0
    assert sum("every user of this machine may call this process" in line for line in lines) == 4
    assert os.environ.get("KVRELAY_CLUSTER_TOKEN") is None
