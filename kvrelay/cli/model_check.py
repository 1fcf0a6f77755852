"""The check of a cluster's model before its processes start: once, in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kvrelay.cluster.process import ProcessSpec, SupervisedProcess
from kvrelay.errors import DeadlineExceeded, Unservable
from kvrelay.worker.check import SERVABLE

MODULE = "kvrelay.worker.check"


class ModelCheck:
    """Asks whether a worker of the cluster could serve the model, with the worker's own flags."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        worker = next(spec for spec in specs if spec.role == "decode")
        spec = replace(worker, module=MODULE)
        self._process = SupervisedProcess(spec, _ignore, _ignore, None)
        self._stopped = threading.Event()

    def run(self, timeout: float) -> None:
        """``Unservable`` with every reason. Returns early after ``stop``."""
        self._process.start()
        ended = self._process.dead.wait(timeout)
        if self._stopped.is_set():
            return
        if not ended:
            self.stop()
            raise DeadlineExceeded(
                f"after {timeout:g} s the model is still being checked: on a busy host give more"
                " time with --start-timeout"
            )
        said = list(self._process.tail)
        if not said or said[-1] != SERVABLE:
            raise Unservable(said[-1] if said else "the check of the model ended without a word")

    def stop(self) -> None:
        """End the check, from any thread."""
        self._stopped.set()
        self._process.end()


def _ignore(spec: ProcessSpec, text: str) -> None:
    """The result is in the last lines of the process."""
