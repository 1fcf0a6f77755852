"""Starting one supervised process: a fresh interpreter, or a fork of one that has torch loaded.

Importing torch and transformers costs seconds for each worker. A fork server (the standard
library's) imports them once; workers forked from it start at once, share that memory, and run the
same module in the same way. The GPU cannot be used after a fork, so it is for the CPU only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import IO, Protocol

from kvrelay import child

PRELOADED = ["prefill_service.service", "decode_service.service", "worker.main"]
_forking = threading.Lock()  # multiprocessing's own books of its children are not thread-safe


class Running(Protocol):
    """A process that was started: its lines, its end, and our end of its lifeline."""

    pid: int

    @property
    def output(self) -> IO[bytes]:
        """Its standard output and error, to the end."""
        ...

    def wait(self, ended: Callable[[], None]) -> int:
        """Wait for its end, call ``ended``, end what it left in its group; the status."""
        ...


def signal_group(pid: int, number: int) -> None:
    """To the process and all it started; to itself alone while it has no group of its own yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def fresh(module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> Running:
    """In an interpreter of its own."""
    reader, writer = os.pipe()
    try:
        popen = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.child", str(reader), module, *args],
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


def forked(module: str, args: tuple[str, ...], environ: Mapping[str, str]) -> Running:
    """From the fork server, which is started by the first call and ends with this process."""
    context = _context()
    lifeline, ours = context.Pipe(duplex=False)
    output, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=child.forked, args=(lifeline, theirs, module, args, dict(environ)), daemon=True
    )
    with _forking, _script_left_alone():
        process.start()
    lifeline.close()
    theirs.close()
    return _Forked(process, output, ours)


@contextmanager
def _script_left_alone() -> Iterator[None]:
    """multiprocessing imports the script that was run into each process that it starts, and the
    cluster which that makes would be made there again. What is a package's own it does not."""
    main = sys.modules["__main__"]
    known, main.__spec__ = main.__spec__, ModuleSpec("kvrelay.__main__", None)
    try:
        yield
    finally:
        main.__spec__ = known


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class _Fresh:
    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        if popen.stdout is None:
            raise RuntimeError("a process without a pipe for its output")
        self.pid, self.output = popen.pid, popen.stdout
        self._popen, self._lifeline = popen, lifeline

    def wait(self, ended: Callable[[], None]) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended()
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.close(self._lifeline)
        return self._popen.wait()


class _Forked:
    def __init__(
        self,
        process: ForkServerProcess,
        output: connection.Connection,
        lifeline: connection.Connection,
    ) -> None:
        if process.pid is None:
            raise RuntimeError("a process without a number")
        self.pid, self.output = process.pid, os.fdopen(os.dup(output.fileno()), "rb")
        output.close()
        self._process, self._lifeline = process, lifeline

    def wait(self, ended: Callable[[], None]) -> int:
        connection.wait([self._process.sentinel])
        ended()
        signal_group(self.pid, signal.SIGKILL)
        self._lifeline.close()
        with _forking:
            status = self._process.exitcode
        return 255 if status is None else status
