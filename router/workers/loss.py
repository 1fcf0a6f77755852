"""How a leg can be lost through no word of its worker; each goes on elsewhere."""

from __future__ import annotations

from kvrelay.errors import Unavailable


class WorkerLost(Unavailable):
    """The worker died, was started again, or the connection to it broke."""


class WorkerSilent(Unavailable):
    """The worker does not answer; it may be alive."""
