"""A program on a terminal of its own, where Ctrl-C signals its whole process group."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import TracebackType

from kvrelay.cluster.layout import ROOT
from tests.cluster.processes import until

TAKES_IT = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
TAKES_IT += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
OURS = "kvrelay.process.sigint"
START_SECONDS, END_SECONDS = 90.0, 30.0


class Terminal:
    """``python -m MODULE ARGS...`` on a new terminal; a context manager that ends it."""

    def __init__(self, folder: Path, module: str, *args: str) -> None:
        self._text = bytearray()
        self._mark = f"TERMINAL_OF_A_TEST={uuid.uuid4()}"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        keys, screen = os.openpty()
        self._keys = keys
        name, _, value = self._mark.partition("=")
        environ = {**os.environ, name: value, "TMPDIR": str(self.temporary)}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", TAKES_IT, "-X", "importtime", "-m", module, *args],
            cwd=ROOT,
            env=environ,
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()  # ends when nobody has the terminal open any more
        os.close(self._keys)

    @property
    def said(self) -> str:
        """The text on the terminal, without the list of imports."""
        lines = self._text.decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("import time:"))

    def wait_for_its_first_line(self) -> None:
        """Wait until our code runs; the interpreter's own start is not under test."""
        until(self._beyond_its_first_line, lambda: f"its first line; it said:\n{self.said}")

    def wait_for(self, text: str) -> None:
        """Wait until this text is on the terminal."""
        until(lambda: text in self.said, lambda: f"{text}; it said:\n{self.said}", START_SECONDS)

    def ctrl_c(self) -> None:
        os.write(self._keys, b"\x03")

    def status(self) -> int:
        """The exit status of the program, which has to end soon."""
        try:
            return self.popen.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end; it said:\n{self.said}") from None

    def read_to_the_end(self) -> None:
        """Returns when all that was said is in ``said``; nobody may have the terminal open."""
        self._reader.join(END_SECONDS)
        assert not self._reader.is_alive()

    def left(self) -> dict[int, str]:
        """The processes that the program left behind."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and self._mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:  # it ended meanwhile, or is somebody else's
                continue
        return {pid: line.decode() for pid, line in found.items()}

    def _beyond_its_first_line(self) -> bool:
        assert self.popen.poll() is None, self.said
        imports = [line for line in self._text.splitlines() if line.startswith(b"import time:")]
        ours = [line.endswith(OURS.encode()) for line in imports]
        return any(ours) and not ours[-1]

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._keys, 1 << 16)
            except OSError:  # how Linux says that nobody has it open
                return
            if not data:
                return
            self._text += data
