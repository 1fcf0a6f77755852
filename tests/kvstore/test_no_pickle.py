"""A store and its clients go on working in processes in which nothing can be pickled."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.client.transports.selector import TRANSPORTS
from tests.kvstore.conftest import ready, stop

WITHOUT = """
import pickle, sys

def refuse(*given, **named):
    print("something was pickled", flush=True)
    raise SystemExit(1)

for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
    setattr(pickle, name, refuse)
"""
SERVICE = (
    WITHOUT
    + """
from kvstore.main import main
sys.exit(main(sys.argv[1:]))
"""
)
CLIENT = (
    WITHOUT
    + """
from kvstore import Want, connect
from kvstore.base import NameQuery
from tests.kvstore.rig import make, name_of, put, get

for transport in sys.argv[2:]:
    store = connect(f"{sys.argv[1]}?transport={transport}")
    blocks = [make(size) for size in (100, 300_000, 2_000_000)]
    assert {kept.value for kept in put(store, *blocks)} == {"stored"}
    assert all(got.header is not None for got in get(store, *blocks))
    found = store.lookup(NameQuery([name_of(blocks[0])], ttl=60), 10)
    store.release([found.lease], 10)
    assert store.stats(10).leases == 0
    assert store.clear(10) == 3
    store.close()
print("nothing was pickled")
"""
)


@pytest.mark.cluster
def test_nothing_is_pickled_on_any_way() -> None:
    command = [sys.executable, "-c", SERVICE, "--budget=16MiB"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        client = [sys.executable, "-c", CLIENT, ready(service), *TRANSPORTS]
        done = subprocess.run(client, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "nothing was pickled"), done.stderr
        assert service.poll() is None
    finally:
        stop(service)
