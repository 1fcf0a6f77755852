"""Shared memory through a socket in a folder, which containers mount (``--shared-socket``)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from kvstore.base import PutStatus
from kvstore.client.remote import RemoteStore
from kvstore.config import StoreConfig
from kvstore.limits import StoreLimits
from kvstore.server.block_store import BlockStore
from kvstore.server.listener import ListenerOptions, TransportListener
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import address_of, get, make, put


@pytest.fixture(name="path")
def short_path() -> Iterator[Path]:
    """The system takes 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "store"


def listen(path: Path) -> TransportListener:
    options = ListenerOptions(socket=False, shared_socket=str(path))
    return TransportListener(BlockStore(StoreLimits(1 << 20)), options)


def test_blocks_go_by_it_and_a_killed_store_leaves_nothing_in_the_way(path: Path) -> None:
    for _ in range(2):
        process, url = start_service("--budget=4MiB", f"--shared-socket={path}")
        store = RemoteStore(address_of(url), "shm")
        try:
            block = make(300_000)
            assert put(store, block) == [PutStatus.STORED]
            assert get(store, block)[0].header is not None
            assert store.used == {"shm": 2}
        finally:
            store.close()
            stop(process)  # by SIGKILL: the file stays
        assert path.is_socket()


def test_a_client_without_the_folder_takes_the_next_transport(path: Path) -> None:
    process, url = start_service("--budget=4MiB", f"--shared-socket={path}")
    path.rename(path.with_name("elsewhere"))
    store = RemoteStore(address_of(url))
    try:
        assert put(store, make(300_000)) == [PutStatus.STORED]
        assert store.used == {"socket": 1}
    finally:
        store.close()
        stop(process)


def test_the_socket_of_a_store_that_runs_is_not_taken(path: Path) -> None:
    running = listen(path)
    try:
        with pytest.raises(Rejected, match="shared_socket"):
            listen(path)
        assert path.is_socket()
    finally:
        running.stop()


def test_another_file_is_not_removed(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(Rejected, match="shared_socket"):
        listen(path)
    assert path.read_text() == "mine"


def test_its_path_is_absolute() -> None:
    """Every client opens it, each from its own folder."""
    with pytest.raises(Rejected, match="shared_socket"):
        StoreConfig(shared_socket="store.sock")
