"""A worker that can be held in the middle of a stream; its first argument is its role.

Once a leg has ``HELD_AFTER`` tokens, the engine's thread stands still while the file of ``GATE``
exists and the leg is open: a test acts on a stream that cannot have ended. The rest of the process
answers as ever.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from decode_service.service import register as decode
from kvrelay.engine.core.updates import Token, Update
from kvrelay.rpc.protocol import ROLES
from kvrelay.worker.main import main
from kvrelay.worker.streams import LegStreams
from prefill_service.service import register as prefill

GATE = "GATE_OF_HELD_WORKERS"
HELD_AFTER = 100
_deliver = LegStreams.deliver
_made = Counter[str]()


class Gate:
    """Open at first; the path of the file is in the environment of the workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        """Streams stop."""
        self.path.touch()

    def open(self) -> None:
        """They continue."""
        self.path.unlink(missing_ok=True)


def deliver(self: LegStreams, updates: Sequence[tuple[str, Update]]) -> None:
    """``LegStreams.deliver``, after which a held worker stands still."""
    _deliver(self, updates)
    _made.update(leg for leg, update in updates if isinstance(update, Token))
    gate = Path(os.environ[GATE])
    while any(_made[leg] >= HELD_AFTER for leg in list(self._queues)) and gate.exists():
        time.sleep(0.005)


if __name__ == "__main__":
    LegStreams.deliver = deliver  # type: ignore[method-assign]
    sys.exit(main(ROLES[sys.argv[1]], (prefill, decode), sys.argv[2:]))
