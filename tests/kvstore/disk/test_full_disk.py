"""A file system that is full: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MOUNT = "mount -t tmpfs -o size=2m none {path}"

SCRIPT = """
import sys
from pathlib import Path
from kvstore import PutStatus
from kvstore.disk import writer
from tests.kvstore.disk.rig import inside, size_of, until
from tests.kvstore.rig import make

writer.FIRST_PAUSE = writer.LONGEST_PAUSE = 0.01
path = Path(sys.argv[1])
ballast = path.parent / "ballast"
assert path.parent.is_mount()
ballast.write_bytes(bytes(1 << 20))  # half of the file system is another program's

with inside(path, budget=1 << 20, disk_budget=4 << 20) as store:
    made = [make(30_000) for _ in range(150)]  # 4.5 MB
    for block in made:
        assert store.put(block) is PutStatus.STORED, "a full disk ends no put"
        until(lambda: store.disk.unsaved < 16)
    counters = store.disk.counters
    assert counters.failed > 0, "the system refused no write"
    assert counters.dropped > 0, "no old segment made room"
    assert size_of(path) <= 1 << 20
    assert store.right(*made[-8:]) == [True] * 8
    assert sum(store.right(*made)) < 100
    assert counters.corrupt == store.disk.counters.corrupt == 0

    ballast.unlink()
    failed = store.disk.counters.failed
    more = [make(30_000) for _ in range(25)]
    store.fill(*more)
    assert store.right(*more) == [True] * 25
    assert store.disk.counters.failed == failed, "there was room again"

with inside(path, disk_budget=4 << 20, restore=True) as store:
    assert store.disk.counters.damaged == 0
    assert store.right(*more) == [True] * 25
print("stood")
"""


def test_a_full_file_system_ends_no_put_and_damages_nothing(tmp_path: Path) -> None:
    mounted = f"{MOUNT.format(path=tmp_path)} && exec "
    namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        tried = subprocess.run([*namespace, f"{mounted} true"], capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("this system has no unshare")
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.decode().strip()}")
    command = f'{mounted} "$@"'
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(
        [*namespace, command, "sh", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "stood\n"), done.stderr
