"""Starts one supervised process: in a fresh interpreter, or as a fork of one with torch loaded.

Importing torch and transformers costs each worker seconds. A fork server (``forkserver``) imports
them once; workers forked from it start at once and share that memory. For the CPU only: CUDA does
not survive a fork.

Every process has its own session, so a key on the terminal does not reach it directly.
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

PRELOADED = [
    "prefill_service.service",
    "decode_service.service",
    "kvrelay.worker.main",
    "kvrelay.worker.engines.native",  # the worker imports it when it opens its engine
]
UNKNOWN_STATUS = 255  # for a process whose status was lost with the fork server


class RunningProcess(Protocol):
    """A process that starts or runs, with its output and our end of its lifeline."""

    output: IO[bytes]

    @property
    def pid(self) -> int | None:
        """``None`` before the start."""
        ...

    def wait_started(self) -> bool:
        """Wait for the process id. Returns false if the start failed or was cancelled."""
        ...

    def cancel_start(self) -> None:
        """Cancel a start that has not happened yet; ``wait_started`` then returns false."""
        ...

    def wait(self, ended: Callable[[], None]) -> int:
        """Wait for the end, call ``ended``, kill the rest of the process group.

        Returns the status.
        """
        ...


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process and all of its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def start_fresh(
    module: str,
    args: tuple[str, ...],
    environ: Mapping[str, str],
    python: str = sys.executable,
) -> RunningProcess:
    """Start ``python -m module *args`` in an interpreter of its own."""
    reader, writer = os.pipe()
    try:
        popen = subprocess.Popen(
            [python, "-P", "-m", "kvrelay.cluster.child", str(reader), module, *args],
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
    return _FreshProcess(popen, writer)


def start_forked(module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> RunningProcess:
    """Start the module in a fork of the fork server, which the first call starts."""
    return _ForkedProcess(module, args, environ)


class _FreshProcess:
    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        if popen.stdout is None:
            raise RuntimeError("a process without a pipe for its output")
        self.pid = popen.pid
        self.output = popen.stdout
        self._popen = popen
        self._lifeline = lifeline

    def wait_started(self) -> bool:
        return True

    def cancel_start(self) -> None:
        """Does nothing: the process runs already."""

    def wait(self, ended: Callable[[], None]) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended()
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        os.close(self._lifeline)
        return self._popen.wait()


class _ForkedProcess:
    """Only ``wait_started`` waits for the fork server, which may import for seconds."""

    def __init__(self, module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self.pid: int | None = None
        self._request = json.dumps([module, args, dict(environ)]).encode() + b"\n"
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self._socket = ours
        self._theirs = theirs
        self._writer = writer
        self._replies = ours.makefile("rb")
        self.output: IO[bytes] = os.fdopen(reader, "rb")

    def wait_started(self) -> bool:
        with suppress(OSError):  # the start was cancelled, or the fork server ended
            server.send(self._theirs.fileno(), self._writer)
            self._theirs.close()
            self._socket.sendall(self._request)
            self.pid = self._read_number()
        self._theirs.close()
        os.close(self._writer)
        return self.pid is not None

    def cancel_start(self) -> None:
        if self.pid is None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, ended: Callable[[], None]) -> int:
        status = self._read_number()
        ended()
        if self.pid is None:
            self.output.close()
        elif status is None:
            signal_group(self.pid, signal.SIGKILL)  # in place of the fork server, which ended
        self._replies.close()
        self._socket.close()
        return UNKNOWN_STATUS if status is None else status

    def _read_number(self) -> int | None:
        with suppress(OSError, ValueError):  # ValueError: the fork server closed the socket
            return int(self._replies.readline())
        return None


class ForkServerClient:
    """Starts the fork server on first use, and sends it requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def send(self, *files: int) -> None:
        """Send the socket and the standard output of a new process."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    socket.send_fds(self._control, [b"+"], files)
                    return
            self._end()
            socket.send_fds(self._start(), [b"+"], files)

    def end(self) -> None:
        """Kill the server. Its children run until their lifelines close."""
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair()
        self._control = control
        module = ["-m", "kvrelay.cluster.forkserver"]
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", *module, str(theirs.fileno()), *PRELOADED],
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
        self._control = None
        self._popen = None


server = ForkServerClient()
atexit.register(server.end)
