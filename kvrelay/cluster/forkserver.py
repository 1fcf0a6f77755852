"""The fork server: a process that has imported what workers need, and forks into one on request.

``python -P -m kvrelay.cluster.forkserver FD MODULES...`` imports the modules, then forks for every
socket that it receives over ``FD``. Such a socket carries the request (module, arguments and
environment) and the replies: the new process id and, at its end, its status. The other end of the
socket is the lifeline of the new process (see ``child``); the other end of ``FD`` is the server's.

Not ``multiprocessing.forkserver``, which starts no faster: it imports the parent's main script in
every child, cannot cancel a start while it imports, and reaps a child before the rest of its
process group can be killed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

from kvrelay.cluster import child
from kvrelay.process.cores import set_torch_variables

REQUEST_SECONDS = 10.0  # to receive one request; the requests behind it wait


def main(argv: list[str]) -> None:
    """Fork on request until ``FD`` closes. Each child runs its module and ends."""
    status = 0

    def exit_at_once() -> None:
        """Python would free every imported object, which takes a second; the kernel takes none."""
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    atexit.register(exit_at_once)  # registered first, called last
    set_torch_variables()  # they are read when it is loaded, before any fork
    gc.disable()
    for module in argv[1:]:
        with suppress(ImportError):  # the process that needs the module reports it
            import_module(module)
    gc.collect()
    gc.freeze()  # a child's collections would take 0.2 s more, and copy the pages that are shared
    try:
        child.main(ForkServer(socket.socket(fileno=int(argv[0]))).serve())
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
        raise


class ForkServer:
    """The server's loop. It has no threads: they would be missing in its children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, socket.socket] = {}
        wakeup, waker = socket.socketpair()
        waker.setblocking(False)
        self._wakeup = wakeup
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> list[str]:
        """Returns in a child only: the arguments for ``child.main``."""
        while True:
            ready, _, _ = select.select([self._control, self._wakeup], [], [])
            if self._wakeup in ready:
                self._wakeup.recv(1 << 10)
                self._reap()
            if self._control in ready:
                _, files, _, _ = socket.recv_fds(self._control, 1, 2)
                if not files:
                    os._exit(0)  # ``FD`` is closed; each child sees the end of its own socket
                peer, output = socket.socket(fileno=files[0]), files[1]
                words = self._fork(peer, output)
                os.close(output)
                if words is not None:
                    return words

    def _fork(self, peer: socket.socket, output: int) -> list[str] | None:
        """Returns the arguments for ``child.main`` in the child, ``None`` in the server.

        A closed socket cancels the request.
        """
        with suppress(OSError, ValueError):
            peer.settimeout(REQUEST_SECONDS)
            with peer.makefile("rb") as stream:
                module, args, environ = json.loads(stream.readline())
            peer.settimeout(None)
            if not _is_closed(peer):
                pid = os.fork()
                if pid == 0:
                    return self._in_child(peer, output, environ, [module, *args])
                self._children[pid] = peer
                return None
        peer.close()
        return None

    def _in_child(
        self, peer: socket.socket, output: int, environ: dict[str, str], words: list[str]
    ) -> list[str]:
        gc.enable()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._control, self._wakeup, self._waker, *self._children.values()):
            other.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environ)
        with suppress(OSError):  # the start was cancelled, which the lifeline will report
            peer.sendall(b"%d\n" % os.getpid())
        return [str(peer.detach()), *words]

    def _reap(self) -> None:
        """For every child that ended: kill the rest of its process group, send its status."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with self._children.pop(pid) as peer, suppress(OSError):
                peer.sendall(b"%d\n" % status)


def _is_closed(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
