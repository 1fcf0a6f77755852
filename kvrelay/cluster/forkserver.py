"""The fork server: a process that has imported what workers need, and becomes one when asked to.

``python -m kvrelay.cluster.forkserver FD MODULES...`` imports the modules and then forks for every
socket that it is sent over ``FD``. On such a socket come the module to run, its arguments and
environment; back go the new process's number and, when it has ended, its status. The other end of
it is the lifeline of the new process (see ``child``), and that of ``FD`` is the fork server's own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from types import TracebackType

from kvrelay.cluster import child

REQUEST_SECONDS = 10.0  # for one that has begun to come; meanwhile others wait


def main(argv: list[str]) -> None:
    """Forks until nobody wants it any more. Each child of it runs its module, and ends."""
    ending = FastExit()
    atexit.register(ending.leave)  # what is registered first is called last
    for module in argv[1:]:
        with suppress(ImportError):  # then whoever needs it will say so
            import_module(module)
    with ending:
        child.main(ForkServer(socket.socket(fileno=int(argv[0]))).serve())


class FastExit:
    """Leaves the process with its status when all is done but to take down, object by object, what
    the fork server has imported: that takes a second, and the kernel does it at once."""

    def __init__(self) -> None:
        self._status = 0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = error.code if isinstance(error, SystemExit) else error
        self._status = code if isinstance(code, int) else int(code is not None)

    def leave(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self._status)


class ForkServer:
    """The loop of the fork server. It has no threads: they would be missing in its children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._living: dict[int, socket.socket] = {}
        awake, waker = socket.socketpair()
        self._awake = awake
        self._waker = waker
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> list[str]:
        """Returns in a child only, with what ``child`` is to run there."""
        while True:
            ready, _, _ = select.select([self._control, self._awake], [], [])
            if self._awake in ready:
                self._awake.recv(1 << 10)
                self._bury()
            if self._control in ready:
                _, files, _, _ = socket.recv_fds(self._control, 1, 2)
                if not files:
                    os._exit(0)  # its children see the same, each on its own socket
                peer, output = socket.socket(fileno=files[0]), files[1]
                born = self._answer(peer, output)
                os.close(output)
                if born is not None:
                    return born

    def _answer(self, peer: socket.socket, output: int) -> list[str] | None:
        """In the child: what to run. Whoever does not want it any more has closed the socket."""
        with suppress(OSError, ValueError):
            peer.settimeout(REQUEST_SECONDS)
            with peer.makefile("rb") as stream:
                module, args, environ = json.loads(stream.readline())
            peer.settimeout(None)
            if not _hung_up(peer):
                pid = os.fork()
                if pid == 0:
                    return self._be_born(peer, output, environ, [module, *args])
                self._living[pid] = peer
                return None
        peer.close()
        return None

    def _be_born(
        self, peer: socket.socket, output: int, environ: dict[str, str], words: list[str]
    ) -> list[str]:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._control, self._awake, self._waker, *self._living.values()):
            other.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environ)
        with suppress(OSError):  # then nobody wants it, which the lifeline will say
            peer.sendall(b"%d\n" % os.getpid())
        return [str(peer.detach()), *words]

    def _bury(self) -> None:
        """Those that have ended: what they left in their groups is ended, their status is told."""
        for pid in list(self._living):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with self._living.pop(pid) as peer, suppress(OSError):
                peer.sendall(b"%d\n" % status)


def _hung_up(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
