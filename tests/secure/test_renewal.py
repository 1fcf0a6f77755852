"""Certificates and tokens of a running cluster are exchanged under load: no stream notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay import Completion
from kvrelay.cli.authority import CertificateAuthority
from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.supervisor import Cluster
from kvrelay.errors import KvrelayError
from kvrelay.rpc.channel import ChannelOptions
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.options import SecurityOptions
from tests.models import tiny_model
from tests.secure.secured_cluster import Secured
from tests.secured import ALICE, BOB, CREDENTIALS, SERVICE, write_credentials, write_files

pytestmark = pytest.mark.cluster

NEW_ALICE = "new-secret-of-alice-in-the-test"
NEW_SERVICE = "new-secret-of-the-services-in-the-test"
READ_AGAIN = "certificates and credentials were read again"
KEPT = "certificates and credentials stay as they were"
SECONDS = 60.0
TOKENS = 24
PROMPTS = [list(range(first, first + 40)) for first in range(4)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Secured]:
    """A cluster of its own: its files change."""
    authority = CertificateAuthority()
    files = write_files(tmp_path, "cluster", authority)
    tokens = write_credentials(tmp_path)
    model = tiny_model("llama", tmp_path / "llama", eos_token_id=None)
    lines: list[str] = []
    config = ClusterConfig(
        model=str(model),
        port=0,
        dtype="float32",
        disaggregate="always",
        threads=1,
        store_budget=1 << 26,
        num_blocks=512,
        tls_cert=files.cert,
        tls_key=files.key,
        tls_ca=files.ca,
        credentials=tokens,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_HEALTH_TIMEOUT", "20")
        patch.setenv("KVRELAY_HANDOFF_WAIT", "30")
        made = Cluster(config, on_line=lambda spec, line: lines.append(f"{spec.name}| {line}"))
    try:
        with made as cluster:
            yield Secured(cluster, files, tokens, authority, tmp_path, lines)
    finally:
        print("\n".join(lines[-200:]))


class Load:
    """Answers for the tenant bob, one after the other, until ``stop``; a token is compared.

    ``options``: of the next connection.
    """

    def __init__(self, running: Secured, expected: list[list[int]]) -> None:
        self._running = running
        self.options = running.options(BOB)
        self._expected = expected
        self._stopped = threading.Event()
        self.answers = 0

    def run(self, thread: int) -> None:
        while not self._stopped.is_set():
            answer = self._running.complete_as(self.options, PROMPTS[thread], TOKENS)
            check(answer, self._expected[thread])
            self.answers += 1

    def stop(self) -> None:
        self._stopped.set()


def check(answer: Completion, expected: list[int]) -> None:
    """Nothing was lost, computed again, or moved to another worker."""
    assert list(answer.token_ids) == expected
    assert answer.usage.recomputed == 0
    assert len(answer.usage.legs) == 2


def wait_read(running: Secured, times: int, what: str = READ_AGAIN) -> None:
    """Until each process has logged it so often."""
    names = {spec.name for spec in running.cluster.specs}
    end = time.monotonic() + SECONDS
    while True:
        counts = dict.fromkeys(names, 0)
        for line in list(running.lines):
            if what in line:
                counts[line.split("|")[0]] += 1
        if all(count >= times for count in counts.values()):
            return
        assert time.monotonic() < end, counts
        time.sleep(0.05)


def services(running: Secured, tokens: str, alice: str = NEW_ALICE) -> None:
    """Write a file with these service tokens over the one that is used, at once."""
    text = CREDENTIALS.replace(f'service = "{SERVICE}"', f"service = {tokens}")
    made = running.folder / "next"
    made.mkdir(exist_ok=True)
    Path(write_credentials(made, text.replace(ALICE, alice))).replace(running.tokens)


def rotate(running: Secured, load: Load, answers: list[Future[None]]) -> None:
    """New certificates and tokens in four steps; the load has answers in each of them."""
    write_files(running.folder, "cluster", running.authority, days=30)
    wait_read(running, 1)
    for step, tokens in enumerate(
        (f'["{SERVICE}", "{NEW_SERVICE}"]', f'["{NEW_SERVICE}", "{SERVICE}"]', f'"{NEW_SERVICE}"'),
        2,
    ):
        services(running, tokens)
        wait_read(running, step)
        wait_answers(load, answers)


def wait_answers(load: Load, answers: list[Future[None]]) -> None:
    """Until each thread has begun and ended an answer."""
    before, end = load.answers, time.monotonic() + SECONDS
    while load.answers < before + 2 * len(PROMPTS):
        assert time.monotonic() < end
        for each in answers:
            if each.done():
                each.result()  # raises what ended it
        time.sleep(0.05)


def exchange_authority(running: Secured, load: Load, answers: list[Future[None]]) -> None:
    """The steps that docs/security.md lists."""
    files, other = running.files, CertificateAuthority()
    both = running.authority.own.cert + other.own.cert
    Path(files.ca).write_bytes(both)
    wait_read(running, 1)
    client = write_files(running.folder, "client", other)
    Path(client.ca).write_bytes(both)
    load.options = ChannelOptions(security=policy.load(client.options(token=BOB)))
    wait_answers(load, answers)
    issued = other.issue("cluster")
    Path(files.cert).write_bytes(issued.cert)
    Path(files.key).write_bytes(issued.key)
    wait_read(running, 2)
    wait_answers(load, answers)
    Path(files.ca).write_bytes(other.own.cert)
    wait_read(running, 3)
    wait_answers(load, answers)


def under_load(
    running: Secured, change: Callable[[Secured, Load, list[Future[None]]], None]
) -> None:
    """Every answer during a change is the one before it."""
    expected = [list(running.complete(BOB, prompt, TOKENS).token_ids) for prompt in PROMPTS]
    load = Load(running, expected)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(load.run, thread) for thread in range(len(PROMPTS))]
        try:
            change(running, load, answers)
        finally:
            load.stop()
        for each in answers:
            each.result()


@pytest.mark.slow
def test_streams_go_on_while_the_authority_is_exchanged(running: Secured) -> None:
    before = running.options(BOB)
    under_load(running, exchange_authority)
    with pytest.raises(KvrelayError, match="certificate"):
        running.complete_as(before, PROMPTS[0])


@pytest.mark.slow
def test_streams_go_on_while_everything_is_exchanged(running: Secured) -> None:
    under_load(running, rotate)
    with pytest.raises(KvrelayError, match="no token that this server knows"):
        running.complete(ALICE, PROMPTS[0])
    assert len(running.complete(NEW_ALICE, PROMPTS[0]).token_ids) == 8
    old = policy.load(SecurityOptions(credentials=running.tokens)).credentials
    assert old.identify(SERVICE) is None
    assert not [line for line in running.lines if KEPT in line]


def test_a_broken_file_is_logged_and_nothing_changes(running: Secured) -> None:
    Path(running.tokens).write_text("service = ")
    wait_read(running, 1, KEPT)
    assert len(running.complete(BOB, PROMPTS[0]).token_ids) == 8
    services(running, f'"{SERVICE}"')
    wait_read(running, 1)
    assert len(running.complete(NEW_ALICE, PROMPTS[0]).token_ids) == 8
