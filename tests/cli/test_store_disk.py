"""The disk of a store: the one that ``kvrelay up`` starts, and what ``verify`` finds on it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from kvrelay.cluster.config import ClusterConfig
from kvrelay.cluster.layout import process_specs
from kvrelay.cluster.supervisor import STOP_SECONDS
from kvrelay.errors import Rejected
from kvstore import PutStatus, connect
from tests.cli.rig import run
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.disk.rig import files, until
from tests.kvstore.rig import TIMEOUT, make, name_of, put


def args_of_store(config: ClusterConfig) -> tuple[str, ...]:
    return next(spec.args for spec in process_specs(config) if spec.role == "store")


def test_the_store_is_told_of_its_disk() -> None:
    args = args_of_store(ClusterConfig(store_disk="/disk", store_disk_budget=5 << 30))
    assert args[args.index("--disk") + 1] == "/disk"
    assert args[args.index("--disk-budget") + 1] == str(5 << 30)
    assert "--restore" in args
    assert float(args[args.index("--flush-seconds") + 1]) < STOP_SECONDS
    assert "--restore" not in args_of_store(ClusterConfig(store_disk="/disk", restore=False))
    assert "--disk" not in args_of_store(ClusterConfig())


def test_a_disk_is_for_a_store_of_our_own() -> None:
    with pytest.raises(Rejected, match="store_disk"):
        ClusterConfig(store="kvrelay://elsewhere:1", store_disk="/disk")


@pytest.mark.cluster
def test_verify_names_the_blocks_that_are_wrong_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store removed them when they were read, and they were counted as evicted."""
    flags = (f"--disk={tmp_path}", "--disk-budget=64MiB", "--restore", "--budget=16MiB")
    blocks = [make(5000) for _ in range(3)]
    process, url = start_service(*flags)
    with closing(connect(url)) as store:
        assert put(store, *blocks) == [PutStatus.STORED] * 3
    process.terminate()
    assert process.wait() == 0
    (segment,) = files(tmp_path)
    data = bytearray(segment.read_bytes())
    for block in blocks[:2]:
        data[data.index(bytes(block.payload))] ^= 1
    segment.write_bytes(data)
    stop(process)
    process, url = start_service(*flags)
    try:
        with closing(connect(url)) as store:
            until(lambda: (disk := store.stats(TIMEOUT).disk) is not None and disk.entries == 3)
            status, out, _ = run(capsys, "verify", "--store", url, "--json")
            (found,) = json.loads(out)
            assert (status, found["blocks"], found["evicted"]) == (0, 3, 0)
            assert {(one["name"], one["removed"]) for one in found["wrong"]} == {
                (name_of(block).hex(), True) for block in blocks[:2]
            }
            assert put(store, *blocks) == [PutStatus.STORED] * 2 + [PutStatus.EXISTED]
            status, out, _ = run(capsys, "verify", "--store", url)
            assert (status, "0 wrong" in out) == (0, True)
    finally:
        stop(process)
