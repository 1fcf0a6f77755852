"""How a leg can be lost through no word of its worker; each goes on elsewhere."""

from __future__ import annotations

from common.errors import Unavailable


class Lost(Unavailable):
    """The worker died, was started again, or the connection to it broke."""


class Silent(Unavailable):
    """The worker does not answer; it may be alive."""
