"""The supervisor with real processes: health, restart, stop, and never an orphan."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import ROOT
from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.process import ProcessSpec, RestartBackoff, SupervisedProcess, describe
from kvrelay.cluster.supervisor import Cluster, StartInterrupted
from kvrelay.errors import DeadlineExceeded, Rejected, Unavailable
from tests.cluster.processes import alive, until
from tests.cluster.thief import Thief

pytestmark = pytest.mark.cluster
FAST = RestartBackoff(first=0.05, longest=0.2)


def layout(*manners: str) -> Callable[[ClusterConfig], tuple[ProcessSpec, ...]]:
    """A cluster of fake services."""

    def make(config: ClusterConfig) -> tuple[ProcessSpec, ...]:
        ports = free_ports(len(manners))
        return tuple(
            ProcessSpec(
                role="decode",
                index=index,
                module="tests.cluster.fake_service",
                args=(str(port), manner),
                host="127.0.0.1",
                port=port,
                environ={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for index, (port, manner) in enumerate(zip(ports, manners, strict=True))
        )

    return make


def fakes(
    *manners: str,
    on_change: Callable[[ProcessSpec, str], None] | None = None,
    backoff: RestartBackoff = FAST,
) -> Cluster:
    return Cluster(
        ClusterConfig(port=0),
        layout=layout(*manners),
        backoff=backoff,
        on_change=on_change or (lambda spec, what: None),
    )


def pid_of(cluster: Cluster, index: int = 0) -> int:
    pid = cluster.process("decode", index).pid
    assert pid is not None
    return pid


def line_of(cluster: Cluster, begin: str, index: int = 0) -> str:
    """A line of a process, which may come after its first answer to a health check."""
    found: list[str] = []

    def came() -> bool:
        tail = list(cluster.process("decode", index).tail)
        found.extend(line for line in tail if line.startswith(begin))
        return bool(found)

    until(came, f"a line with {begin!r}")
    return found[0]


def test_leaving_the_block_ends_everything() -> None:
    with fakes("good", "good") as cluster:
        pids = [pid_of(cluster, index) for index in range(2)]
        assert all(alive(pid) for pid in pids)
        assert line_of(cluster, "ready on", 1)
    assert not any(alive(pid) for pid in pids)


def test_what_dies_is_started_again_on_the_same_port() -> None:
    said: list[str] = []
    with fakes("good", "good", on_change=lambda spec, what: said.append(what)) as cluster:
        before, other = pid_of(cluster), pid_of(cluster, 1)
        cluster.kill("decode", 0)
        until(lambda: cluster.process("decode", 0).starts == 2, "started again")
        cluster.wait(timeout=20)
        assert pid_of(cluster) != before
        assert pid_of(cluster, 1) == other
    assert any("SIGKILL; restarting" in what for what in said)


def test_it_never_gives_up_and_names_the_process_that_keeps_dying() -> None:
    said: list[str] = []
    deaths = 12  # it used to give up after nine
    with fakes("good", "good", on_change=lambda spec, what: said.append(what)) as cluster:
        process = cluster.process("decode", 0)
        assert cluster.failing() == {}
        for start in range(1, deaths + 1):
            until(partial(_started, process, start), "up")
            cluster.kill("decode", 0)
        until(partial(_started, process, deaths + 1), "up again")
        how = f"was killed by SIGKILL, {deaths} times in a row"
        assert cluster.failing() == {"decode-0": how}
        cluster.wait(timeout=20)
    assert f"{how}; restarting in 0.2 s" in said


def test_a_process_that_has_settled_is_failing_no_more() -> None:
    backoff = RestartBackoff(first=0.05, longest=0.05, settled=3.0)
    with fakes("good", backoff=backoff) as cluster:
        process = cluster.process("decode", 0)
        for start in range(1, 4):
            until(partial(_started, process, start), "up")
            cluster.kill("decode", 0)
        until(lambda: bool(cluster.failing()), "failing")
        until(lambda: not cluster.failing(), "settled")
        assert _started(process, 4)


def _started(process: SupervisedProcess, times: int) -> bool:
    return process.starts == times and process.pid is not None


def test_a_process_that_cannot_start_is_an_error_with_its_last_words() -> None:
    with pytest.raises(Unavailable, match=r"(?s)decode-1 ended before it served.*no such model"):
        fakes("good", "fails").__enter__()


def test_a_process_that_ignores_the_signal_is_killed() -> None:
    cluster = fakes("stubborn")
    cluster.start()
    pid = pid_of(cluster)
    cluster.stop(timeout=0.3)
    assert not alive(pid)


def test_a_stopped_process_is_ended_too() -> None:
    with fakes("good") as cluster:
        pid = pid_of(cluster)
        cluster.kill("decode", 0, signal.SIGSTOP)
    assert not alive(pid)


def test_what_a_process_left_behind_is_killed_with_it() -> None:
    with fakes("parent") as cluster:
        grandchild = int(line_of(cluster, "grandchild").split()[1])
        assert alive(grandchild)
    until(lambda: not alive(grandchild), "grandchild gone")


def test_interrupting_a_start_ends_it() -> None:
    cluster = fakes("good", "silent")
    timer = threading.Timer(0.3, cluster.interrupt)
    timer.start()
    with pytest.raises(StartInterrupted):
        cluster.__enter__()
    timer.join()
    assert cluster.process("decode", 1).pid is None


def test_a_start_that_takes_too_long_names_who_is_missing() -> None:
    cluster = fakes("good", "silent")
    starting = threading.Thread(target=start_until_interrupted, args=(cluster,))
    starting.start()
    try:
        until(cluster.process("decode", 0).served.is_set, "the first serves")
        with pytest.raises(DeadlineExceeded, match=r"after 3 s not ready: decode-1 \("):
            cluster.wait(timeout=3)
    finally:
        cluster.interrupt()
        starting.join()
        cluster.stop()


def start_until_interrupted(cluster: Cluster) -> None:
    with pytest.raises(StartInterrupted):
        cluster.start()


@pytest.mark.parametrize("manner", ["good", "stubborn", "stopped"])
def test_killing_the_supervisor_leaves_no_orphan(manner: str) -> None:
    program = f"""
import sys, threading, signal
from tests.cluster.test_supervisor import fakes, pid_of
cluster = fakes({manner!r} if {manner!r} != "stopped" else "good", "good")
cluster.start()
if {manner!r} == "stopped":
    cluster.kill("decode", 0, signal.SIGSTOP)
print("pids", pid_of(cluster), pid_of(cluster, 1), flush=True)
threading.Event().wait(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as popen:
        try:
            line = popen.stdout.readline() if popen.stdout else ""
        finally:
            popen.kill()
    pids = [int(pid) for pid in re.findall(r"\d+", line)]
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids), "both children gone")


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_ports_stay_reserved_while_a_child_outlives_the_supervisor() -> None:
    """It may still send the token of the cluster to a port whose server has ended."""
    program = """
import threading
from tests.cluster.test_supervisor import fakes, pid_of
cluster = fakes("stubborn", "good")
cluster.start()
print(pid_of(cluster), pid_of(cluster, 1), cluster.specs[1].port, flush=True)
threading.Event().wait(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as popen:
        try:
            line = popen.stdout.readline() if popen.stdout else ""
        finally:
            popen.kill()
    lives, ends, port = map(int, line.split())
    with Thief() as thief:
        until(lambda: not alive(ends), "the other child gone")
        stolen = thief.ask("steal", [port])
        assert alive(lives)
        assert stolen == []
        os.kill(lives, signal.SIGKILL)
        until(lambda: bool(thief.ask("steal", [port])), "the port free with the last child")


def test_ports_are_free_and_differ() -> None:
    ports = free_ports(40)
    assert len(set(ports)) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="ports can be held on Linux only")
def test_a_held_port_is_kept_from_others_and_given_to_its_server() -> None:
    with fakes("good") as cluster:
        port = cluster.specs[0].port
        cluster.kill("decode", 0)
        until(lambda: cluster.process("decode", 0).starts == 2, "started again")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        cluster.wait(timeout=20)


def test_a_port_that_is_taken_is_an_error_before_anything_starts() -> None:
    cluster = fakes("good", "good")
    with socket.socket() as other:
        other.bind(("127.0.0.1", cluster.specs[1].port))
        other.listen()
        with pytest.raises(Rejected, match=rf"port: {cluster.specs[1].port} on 127.0.0.1 is taken"):
            cluster.start()
    assert cluster.process("decode", 0).starts == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "ended with status 0"), (-9, "was killed by SIGKILL"), (-200, "was killed by signal 200")],
)
def test_statuses_in_words(status: int, words: str) -> None:
    assert describe(status) == words


def test_backoff_doubles_up_to_its_bound() -> None:
    waits = [RestartBackoff().wait(deaths) for deaths in range(1, 9)]
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has files in memory")
def test_the_workers_of_a_cluster_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with ``--threads``, a single worker, GPUs or vLLM."""
    name = "KVRELAY_SHARED_CORES"
    config = ClusterConfig(port=0, device="cpu", prefill=1, decode=2)
    cluster = Cluster(config)
    named = {spec.name: spec.environ.get(name) for spec in cluster.specs}
    (path,) = {named.pop(worker) for worker in ("prefill-0", "decode-0", "decode-1")}
    assert set(named.values()) == {None}
    assert path is not None
    assert Path(path).exists()
    cluster.stop()
    assert not Path(path).exists()
    for other in (
        replace(config, threads=1),
        replace(config, prefill=0, decode=1),
        replace(config, device=None, devices="0,1"),
        replace(config, engine="vllm", vllm_python=sys.executable),
    ):
        assert not any(name in spec.environ for spec in Cluster(other).specs)
    monkeypatch.setenv(name, "/dev/shm/cores")
    worker = Cluster(config).process("decode").spec
    assert worker.environ[name] == "/dev/shm/cores"


def test_a_cluster_keeps_to_its_own_store_only_without_a_url(tmp_path: Path) -> None:
    own = Cluster(ClusterConfig(port=0, prefill=0, decode=2))
    assert own.addresses("prefill") == ()
    assert own.store == f"kvrelay://{own.addresses('store')[0]}"
    other = Cluster(ClusterConfig(port=0, store="kvrelay://10.0.0.1:1"))
    assert other.addresses("store") == ()
    assert "kvrelay://10.0.0.1:1" in other.process("decode", 0).spec.args


def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    """A forked process must not run the script that started it, as multiprocessing's do."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from kvrelay.cluster import spawn\n"
        "print('once', flush=True)\n"
        "spawn.PRELOADED.clear()\n"
        "running = spawn.start_forked('this', (), os.environ)\n"
        "assert running.wait_started()\n"
        "print(running.output.read().decode())\n"
        "print('status', running.wait(lambda: None))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.count("once") == 1, done.stdout + done.stderr
    assert "Namespaces are one honking great idea" in done.stdout
    assert "status 0" in done.stdout


IPV6_ONLY = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
SERVES = """
from kvrelay import Client
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.ports import free_ports
from kvrelay.cluster.supervisor import Cluster
from kvrelay.rpc.address import DEFAULT_ROUTER

with Cluster(ClusterConfig(port=free_ports(1)[0])) as cluster, Client(cluster.router) as client:
    client.generate(prompt="The copper mask stands in Boston.", max_tokens=4)
    print(DEFAULT_ROUTER, *(spec.host for spec in cluster.specs), cluster.store.split("]")[0])
"""


@pytest.mark.slow
def test_a_cluster_serves_on_a_host_with_ipv6_only() -> None:
    """It used to end with `no 4 free ports on 127.0.0.1`."""
    inside = ["unshare", "-n", "sh", "-c", IPV6_ONLY, "sh"]
    if sys.platform != "linux" or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs a network namespace and iproute2")
    done = subprocess.run(
        [*inside, sys.executable, "-c", SERVES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    words = done.stdout.split()
    assert words == ["[::1]:50051", *["::1"] * 4, "kvrelay://[::1"], done.stderr
