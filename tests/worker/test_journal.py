"""The file of a journal: one writer, private, and what was there is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.errors import Rejected
from kvrelay.worker.journal_file import BEFORE, writer

HOLD = """
import sys
from kvrelay.worker.journal_file import writer
write = writer(sys.argv[1])
write("of another\\n")
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_workers_do_not_write_one_file(tmp_path: Path) -> None:
    """One configuration for all workers of a machine gave one file, each writing over the other."""
    path = tmp_path / "journal"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(Rejected, match=r"^journal: another worker writes .*journal: give each"):
            writer(str(path))
        assert path.read_text() == "of another\n"
    finally:
        other.kill()
        other.communicate()
    writer(str(path))("of this one\n")
    assert path.read_text() == "of this one\n"
    assert path.with_name("journal" + BEFORE).read_text() == "of another\n", "it was killed"


def test_a_file_made_by_another_program_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for left in ("", "left"):
        path.write_text(left)
        path.chmod(0o644)
        writer(str(path))("a prompt\n")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() == "a prompt\n"
        path.unlink()


def test_what_is_no_file_is_written_as_it_is() -> None:
    writer(os.devnull)("nothing\n")
    writer(os.devnull)("nothing\n")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"^journal: cannot write .*missing.*: No such file"):
        writer(str(tmp_path / "missing" / "journal"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is closed, full
def test_where_a_full_disk_ended_it_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    write = writer("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write("a line\n")
    assert "the journal /dev/full ends here: No space left on device" in caplog.text
