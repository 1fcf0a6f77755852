"""Starting one supervised process: a fresh interpreter, or a fork of one that has torch loaded.

Importing torch and transformers costs seconds for each worker. A fork server (``nursery``) imports
them once; workers forked from it start at once, share that memory, and run the same module in the
same way. The GPU cannot be used after a fork, so it is for the CPU only.

Each process has a session of its own: no key on the terminal reaches it but through us.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Protocol

PRELOADED = ["prefill_service.service", "decode_service.service", "kvrelay.worker.main"]
UNKNOWN = 255  # the status of what ended without one that anybody saw


class RunningProcess(Protocol):
    """A process that was started: its lines, its end, and our end of its lifeline."""

    output: IO[bytes]

    @property
    def pid(self) -> int | None:
        """``None`` before it was born."""
        ...

    def born(self) -> bool:
        """Wait until it has a number; false if it never will."""
        ...

    def cancel(self) -> None:
        """If it was not born yet, it will not be, or not live; ``born`` returns."""
        ...

    def wait(self, ended: Callable[[], None]) -> int:
        """Wait for its end, call ``ended``, end what it left in its group; the status."""
        ...


def signal_group(pid: int, number: int) -> None:
    """To the process and all it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def fresh(module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> RunningProcess:
    """In an interpreter of its own."""
    reader, writer = os.pipe()
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvrelay.cluster.child", str(reader), module, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            pass_fds=(reader,),
        )
    except OSError:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return _Fresh(popen, writer)


def forked(module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> RunningProcess:
    """From the fork server, which the first call starts, and which ends with this process."""
    return _Forked(module, args, environ)


class _Fresh:
    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        if popen.stdout is None:
            raise RuntimeError("a process without a pipe for its output")
        self.pid = popen.pid
        self.output = popen.stdout
        self._popen = popen
        self._lifeline = lifeline

    def born(self) -> bool:
        return True

    def cancel(self) -> None:
        """It has been born."""

    def wait(self, ended: Callable[[], None]) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended()
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.close(self._lifeline)
        return self._popen.wait()


class _Forked:
    """What waits for the fork server, which may import for seconds, is in ``born``."""

    def __init__(self, module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self.pid: int | None = None
        self._request = json.dumps([module, args, dict(environ)]).encode() + b"\n"
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._theirs = theirs
        self._answers = self._socket.makefile("rb")
        reader, writer = os.pipe()
        self._writer = writer
        self.output: IO[bytes] = os.fdopen(reader, "rb")

    def born(self) -> bool:
        with suppress(OSError):  # it was cancelled, or the fork server was ended
            server.send(self._theirs.fileno(), self._writer)
            self._theirs.close()
            self._socket.sendall(self._request)
            self.pid = self._number()
        self._theirs.close()
        os.close(self._writer)
        return self.pid is not None

    def cancel(self) -> None:
        if self.pid is None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, ended: Callable[[], None]) -> int:
        status = self._number()
        ended()
        if self.pid is None:
            self.output.close()
        elif status is None:
            signal_group(self.pid, signal.SIGKILL)  # the fork server is gone, which would do it
        self._answers.close()
        self._socket.close()
        return UNKNOWN if status is None else status

    def _number(self) -> int | None:
        with suppress(OSError, ValueError):  # the latter if nothing came
            return int(self._answers.readline())
        return None


class ForkServerClient:
    """The one of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def send(self, *files: int) -> None:
        """Gives it a socket and the standard output of who is to be born; starts it if need be."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    socket.send_fds(self._control, [b"+"], files)
                    return
            self._end()
            socket.send_fds(self._start(), [b"+"], files)

    def end(self) -> None:
        """At once. Its children live on, until their lifelines end."""
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair()
        self._control = control
        with theirs:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kvrelay.cluster.forkserver",
                    str(theirs.fileno()),
                    *PRELOADED,
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
        self._control = self._popen = None


server = ForkServerClient()
atexit.register(server.end)
