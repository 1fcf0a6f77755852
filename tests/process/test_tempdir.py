"""A temporary directory where the root cannot be written, as in a read-only container."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvrelay.cli.doctor.machine import examine
from kvrelay.cluster.layout import ROOT
from kvrelay.errors import Rejected
from kvrelay.process import tempdir

READ_ONLY = """
for mount in $(awk '{print $2}' /proc/mounts | grep -vE '^/(proc|sys|dev)(/|$)' | sort -r); do
    mount -o remount,ro,bind "$mount" 2>/dev/null
done
exec "$@"
"""
PROGRAM = """
import os, tempfile
from kvrelay.process.tempdir import ensure_temporary_directory
try:
    open("/tmp/kvrelay-probe", "w").close()
    raise SystemExit("the root can be written")
except OSError:
    pass
ensure_temporary_directory()
import torch._dynamo
print(os.environ["TMPDIR"], tempfile.gettempdir())
"""


def none() -> str:
    raise FileNotFoundError("No usable temporary directory found")


def test_dev_shm_is_used_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    tempdir.ensure_temporary_directory()
    assert os.environ["TMPDIR"] == "/nowhere"
    monkeypatch.setattr(tempfile, "gettempdir", none)
    tempdir.ensure_temporary_directory()
    assert os.environ["TMPDIR"] == "/dev/shm"


def test_without_any_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempdir, "FALLBACK", Path("/nowhere"))
    with pytest.raises(Rejected, match="TMPDIR: no writable temporary directory: mount one"):
        tempdir.ensure_temporary_directory()
    with pytest.raises(SystemExit, match="decode_service: TMPDIR: no writable"):
        tempdir.require("decode_service")


def test_doctor_finds_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvrelay up`` refuses to start there: doctor must not say that nothing is missing."""
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "gettempdir", none)
        patched.setattr(tempdir, "FALLBACK", Path("/nowhere"))
        (finding,) = [each for each in examine() if each.name == "temporary files"]
        assert finding.state == "missing"
        assert "set TMPDIR" in finding.means
    (finding,) = [each for each in examine() if each.name == "temporary files"]
    assert (finding.state, finding.found) == ("ok", f"in {tempfile.gettempdir()}")


def test_torch_can_be_imported_on_a_read_only_root() -> None:
    unshare = ["unshare", "-m", "sh", "-c"]
    if sys.platform != "linux" or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("needs a mount namespace")
    done = subprocess.run(
        [*unshare, READ_ONLY, "sh", sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TMPDIR"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["/dev/shm", "/dev/shm"], done.stderr
