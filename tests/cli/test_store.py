"""``kvrelay store`` on a real store: its output, the errors it finds, its exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from kvrelay.block.header import decode
from kvrelay.cli.store import clear, options
from kvrelay.errors import Rejected
from kvrelay.rpc.deadline import Deadline
from kvstore import Block, PutStatus, Store, connect
from kvstore.base import NameQuery
from kvstore.client import remote
from kvstore.client.remote import RemoteStore
from kvstore.urls import standalone_url
from tests.cli.rig import run
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.redis.redisserver import Server
from tests.kvstore.redis.redisserver import running as ready
from tests.kvstore.rig import TIMEOUT, arena_in, make, name_of, put

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, url = start_service("--budget=16MiB")
    yield process, url
    stop(process)


@pytest.fixture
def url(running: tuple[subprocess.Popen[str], str]) -> str:
    return running[1]


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = connect(url)
    made.clear(TIMEOUT)
    yield made
    made.close()


@pytest.fixture
def blocks(store: Store) -> list[Block]:
    made = [make(5000, count=7)]
    made += [make(5000, count=7, parent=name_of(made[0])), make(300, count=3)]
    put(store, *made)
    return made


def test_clear_of_a_redis_counts_blocks_and_not_what_else_lies_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    with ready(server):
        mine, other = (f"redis://{server.address}?prefix={name}" for name in "ab")
        for url in (mine, other):
            with closing(connect(url)) as store:
                put(store, make(300), make(300))
        terminal = io.StringIO("y\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        status, out, err = run(capsys, "clear", "--store", mine)
        assert (status, "Remove 2 blocks from" in err) == (0, True)
        assert "2 blocks removed, 0 left" in out
        with closing(connect(other)) as store:
            assert store.clear(TIMEOUT) == 2


def test_stats_of_several_stand_side_by_side(
    url: str, blocks: Sequence[Block], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "stats", "--store", url)
    assert status == 0
    assert ["entries", "3"] in [line.split() for line in out.splitlines()]
    both = f"{url},kvrelay://127.0.0.1:1?write=yes"
    status, out, err = run(capsys, "stats", "--json", "--store", both)
    assert status == 1
    assert err.count("\n") == 1
    figures = json.loads(out)
    assert figures[url]["entries"] == 3
    assert "error" in figures["kvrelay://127.0.0.1:1"]


def test_ls_lists_names_and_what_they_are(
    url: str, blocks: Sequence[Block], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name_of(block).hex() for block in blocks]
    status, out, err = run(capsys, "ls", "--store", url, "--long")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == names
    assert err.strip().startswith("3 blocks")
    _, out, _ = run(capsys, "ls", "--store", url, "--json", names[1][:9])
    (line,) = out.splitlines()
    assert json.loads(line) == {
        "store": url,
        "name": names[1],
        "tokens": 7,
        "bytes": blocks[1].size,
        "partial": False,
        "leases": 0,
        "tenant": "",
        "memory": True,
        "disk": False,
    }
    _, out, _ = run(capsys, "ls", "--store", url, "--json", "--limit", "2")
    assert len(out.splitlines()) == 2


def test_inspect_shows_all_of_one_block(
    url: str, blocks: Sequence[Block], capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(blocks[1]).hex()
    status, out, _ = run(capsys, "inspect", "--store", url, "--json", name[:20])
    (found,) = json.loads(out)
    header = decode(blocks[1].header)
    assert status == 0
    assert (found["name"], found["tokens"]) == (name, list(header.tokens))
    assert (found["parent"], found["parent_there"]) == (header.parent.hex(), True)
    assert (found["dtype"], found["shape"], found["state"]) == ("uint8", [4, 1250], "right")
    status, out, _ = run(capsys, "inspect", "--store", url, name)
    assert status == 0
    assert all(word in out for word in (name, header.parent.hex(), "0 1 2 3 4 5 6", "right"))
    status, _, err = run(capsys, "inspect", "--store", url, "0" * 64)
    assert (status, err.count("\n")) == (1, 1)
    status, _, err = run(capsys, "inspect", "--store", url, "no-name")
    assert (status, err.count("\n")) == (2, 1)


def test_verify_finds_the_block_with_a_flipped_byte(
    running: tuple[subprocess.Popen[str], str],
    blocks: Sequence[Block],
    capsys: pytest.CaptureFixture[str],
) -> None:
    process, url = running
    status, out, _ = run(capsys, "verify", "--store", url)
    assert status == 0
    assert "3 blocks" in out
    assert "0 wrong" in out
    name = name_of(blocks[0])
    direct = RemoteStore(url.removeprefix("kvrelay://"))
    located = direct._calls.locate([name], 60_000, Deadline.after(TIMEOUT))
    direct._calls.release_lease(located.boot, located.lease, TIMEOUT)
    place = located.offsets[0]
    direct.close()
    for offset, field in ((blocks[0].size - 1, "payload_checksum"), (130, "header_checksum")):
        with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(at := arena_in(process) + place + offset)
            byte = memory.read(1)
            memory.seek(at)
            memory.write(bytes([byte[0] ^ 1]))
            try:
                status, out, _ = run(capsys, "verify", "--store", url, "--json")
                (found,) = json.loads(out)
                assert (status, found["blocks"]) == (1, 3)
                ((wrong, error),) = [(w["name"], w["error"]) for w in found["wrong"]]
                assert (wrong, error.partition(":")[0]) == (name.hex(), field)
                status, out, _ = run(capsys, "verify", "--store", url, name.hex()[:8])
                assert (status, out.startswith(f"wrong {name.hex()[:12]}")) == (1, True)
            finally:
                memory.seek(at)
                memory.write(byte)
    assert run(capsys, "verify", "--store", url)[0] == 0


def test_verify_with_repair_takes_wrong_blocks_out(
    running: tuple[subprocess.Popen[str], str],
    store: Store,
    blocks: Sequence[Block],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "RECHECK_SECONDS", TIMEOUT)
    process, url = running
    direct = RemoteStore(url.removeprefix("kvrelay://"))
    wrong = [name_of(block) for block in blocks[:2]]
    located = direct._calls.locate(wrong, 60_000, Deadline.after(TIMEOUT))
    direct._calls.release_lease(located.boot, located.lease, TIMEOUT)
    direct.close()
    with open(f"/proc/{process.pid}/mem", "r+b", buffering=0) as memory:
        for place, block in zip(located.offsets, blocks, strict=False):
            memory.seek(at := arena_in(process) + place + block.size - 1)
            byte = memory.read(1)
            memory.seek(at)
            memory.write(bytes([byte[0] ^ 1]))
    status, out, _ = run(capsys, "verify", "--store", url, "--repair", "--json")
    (found,) = json.loads(out)
    assert {(one["name"], one["removed"]) for one in found["wrong"]} == {
        (name.hex(), True) for name in wrong
    }
    assert (status, found["blocks"]) == (0, 3)
    status, out, _ = run(capsys, "verify", "--store", url, "--repair")
    assert (status, "1 blocks" in out, "0 wrong" in out) == (0, True, True)
    assert put(store, *blocks[:2]) == [PutStatus.STORED] * 2


def test_clear_asks_before_it_does(
    url: str,
    store: Store,
    blocks: Sequence[Block],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Person:
        """A user at a terminal."""

        def __init__(self, answer: str, present: bool = True) -> None:
            self._answer = answer
            self._present = present

        def isatty(self) -> bool:
            return self._present

        def readline(self) -> str:
            return self._answer

    monkeypatch.setattr("sys.stdin", Person("y\n", present=False))
    with pytest.raises(Rejected, match="--yes"):
        clear.main(["--store", url])
    monkeypatch.setattr("sys.stdin", Person("no\n"))
    status, _, err = run(capsys, "clear", "--store", url)
    assert (status, store.stats(TIMEOUT).entries) == (1, 3)
    assert "Remove 3 blocks" in err
    monkeypatch.setattr("sys.stdin", Person("y\n"))
    held = store.lookup(NameQuery([name_of(blocks[0])], ttl=60), TIMEOUT).lease
    assert held is not None
    status, out, _ = run(capsys, "clear", "--store", url)
    assert (status, store.stats(TIMEOUT).entries) == (0, 1)
    assert "2 blocks removed, 1 left" in out
    store.release([held], TIMEOUT)
    status, out, _ = run(capsys, "clear", "--yes", "--json", "--store", url)
    assert json.loads(out) == {url: {"removed": 1, "left": 0}}


@pytest.mark.parametrize(
    "words", [["stats"], ["ls"], ["inspect", "ab"], ["verify"], ["clear", "--yes"]], ids=" ".join
)
def test_a_store_that_is_not_there_is_a_line_and_status_1(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *words, "--store", "kvrelay://127.0.0.1:1", "--timeout", "5")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("kvrelay store")


@pytest.mark.parametrize(
    "words", [[], ["--store", "kvrelay://h:1", "--endpoints", "x"]], ids=["none", "both"]
)
def test_the_store_must_be_named_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "stats", *words)
    assert ended.value.code == 2
    assert "give one of --store" in capsys.readouterr().err


def test_a_store_stands_once_in_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are labelled with the store's name."""
    with pytest.raises(Rejected, match=r"redis://h\?prefix=a is in the list twice"):
        stores_of("redis://h?prefix=a,redis://me:hush@h?life=9&prefix=a")
    assert len(stores_of("redis://h?prefix=a,redis://h?prefix=b,redis://h?db=1,redis://h")) == 4
    with pytest.raises(Rejected, match="is empty: give a URL"):
        stores_of("")


def stores_of(text: str) -> list[str]:
    return options.StoreSelection(store=text).urls()


def test_a_full_disk_is_a_line(url: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvrelay", "store", "stats", "--store", url],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr


def test_the_store_of_a_running_cluster_is_in_its_endpoints(
    url: str, blocks: Sequence[Block], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "up.json"
    path.write_text(json.dumps({"router": "h:1", "store": url}))
    status, out, _ = run(capsys, "stats", "--endpoints", str(path))
    assert (status, url in out) == (0, True)


def test_a_url_of_a_list_can_stand_alone() -> None:
    assert (
        standalone_url("kvrelay://h:1?write=yes&transport=shm&promote=no")
        == "kvrelay://h:1?transport=shm"
    )
    assert standalone_url("kvrelay://h:1?write=yes") == "kvrelay://h:1"
    assert standalone_url("redis://h:1/2") == "redis://h:1/2"
