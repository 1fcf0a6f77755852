"""A worker that kills itself when it receives a poison; its first argument is its role."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

from decode_service.service import register as decode
from kvrelay.rpc.protocol import ROLES, Role
from kvrelay.rpc.tracing import Headers
from kvrelay.v1 import types_pb2
from kvrelay.worker.main import main
from kvrelay.worker.streams import LegUpdates
from kvrelay.worker.worker import Worker
from prefill_service.service import register as prefill

POISON = (66, 6, 66, 6)
SLOW_POISON = (77, 7, 77, 7)
SILENT_SECONDS = 1.5  # after SLOW_POISON, as a process that takes long to end on a busy host
_run = Worker.run


def deadly(
    self: Worker,
    role: Role,
    leg: types_pb2.Leg,
    handoff: types_pb2.Handoff | None = None,
    headers: Headers = (),
) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
    """``Worker.run``, but a prompt that begins with a poison kills the process."""
    match tuple(leg.prompt_token_ids[: len(POISON)]):
        case first if first == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        case first if first == SLOW_POISON:
            killer = f"sleep {SILENT_SECONDS}; kill -9 {os.getpid()}"
            null = subprocess.DEVNULL
            subprocess.Popen(["/bin/sh", "-c", killer], stdin=null, stdout=null, stderr=null)
            os.kill(os.getpid(), signal.SIGSTOP)
    return _run(self, role, leg, handoff, headers)


if __name__ == "__main__":
    Worker.run = deadly  # type: ignore[method-assign]
    sys.exit(main(ROLES[sys.argv[1]], (prefill, decode), sys.argv[2:]))
