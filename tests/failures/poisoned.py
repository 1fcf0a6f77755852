"""A worker that kills itself when it receives ``POISON``; its first argument is its role."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

from decode_service.service import register as decode
from kvrelay.rpc.protocol import ROLES, Role
from kvrelay.v1 import types_pb2
from kvrelay.worker.main import main
from kvrelay.worker.streams import LegUpdates
from kvrelay.worker.worker import Worker
from prefill_service.service import register as prefill

POISON = (66, 6, 66, 6)
_run = Worker.run


def deadly(
    self: Worker, role: Role, leg: types_pb2.Leg, handoff: types_pb2.Handoff | None = None
) -> AbstractAsyncContextManager[AsyncGenerator[LegUpdates]]:
    """``Worker.run``, but a prompt that begins with ``POISON`` kills the process."""
    if tuple(leg.prompt_token_ids[: len(POISON)]) == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    return _run(self, role, leg, handoff)


if __name__ == "__main__":
    Worker.run = deadly  # type: ignore[method-assign]
    sys.exit(main(ROLES[sys.argv[1]], (prefill, decode), sys.argv[2:]))
