"""A client that disconnects: its blocks and slots are free within a second on every worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvrelay import Client
from kvrelay.cluster.supervisor import Cluster
from tests.exact.conftest import Models, cluster
from tests.exact.idle import check_idle, loads

FREE_WITHIN = 1.0
PROGRAM = """
import sys
from kvrelay import Client
for chunk in Client(sys.argv[1]).generate(
    token_ids=list(range(200)), max_tokens=800, temperature=0.0, ignore_eos=True, timeout=60
):
    print(len(chunk.token_ids), flush=True)
"""


@pytest.fixture(scope="module")
def up(models: Models) -> Iterator[Cluster]:
    with cluster(models("llama"), block_size=4, num_blocks=1024) as running:
        yield running


def test_closing_the_iterator(up: Cluster) -> None:
    with Client(up.router) as client:
        chunks = client.generate(
            token_ids=list(range(100)), max_tokens=800, temperature=0.0, ignore_eos=True
        )
        seen = [next(chunks) for _ in range(4)]
        assert seen
        chunks.close()
        check_idle(up, FREE_WITHIN)


def test_closing_before_the_first_token(up: Cluster) -> None:
    with Client(up.router) as client:
        for _ in range(20):
            chunks = client.generate(token_ids=list(range(250)), max_tokens=700, temperature=0.0)
            thread = threading.Timer(0.01, lambda: None)
            thread.start()
            thread.join()
            chunks.close()
        check_idle(up, FREE_WITHIN)


@pytest.mark.parametrize("tokens_seen", [1, 3, 20])
def test_killed_client(up: Cluster, tokens_seen: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, up.router], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(tokens_seen):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    check_idle(up, FREE_WITHIN)
    begun = time.monotonic()  # between prefill and decode both workers are idle for a moment
    while any(load.free_blocks != 1024 for load in loads(up)):
        assert time.monotonic() - begun < FREE_WITHIN
