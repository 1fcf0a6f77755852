"""Workers that announced themselves: addresses, and until when each holds. Pure, time passed in."""

from __future__ import annotations

from kvrelay.errors import Exhausted, Rejected
from kvrelay.rpc.address import Address

SHORTEST, LONGEST = 1.0, 300.0  # seconds that an announcement holds


def check_announcement(address: str, ttl: float) -> str:
    """The address as it is listed; ``Rejected`` for what is no announcement."""
    parsed = Address.parse(address)
    if not parsed.port:
        raise Rejected("address", f"{address!r} is not HOST:PORT, as others reach it")
    if not SHORTEST <= ttl <= LONGEST:
        raise Rejected("ttl_seconds", f"must be {SHORTEST:g} to {LONGEST:g}, got {ttl:g}")
    return str(parsed)


class Announcements:
    """Who said so in time."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def hear(self, address: str, ttl: float, now: float, limit: int) -> None:
        """Take an announcement, or one more of the same; ``Exhausted`` beyond so many."""
        known = self.listed(now)
        if address not in known and len(known) >= limit:
            raise Exhausted(f"there are {len(known)} workers that announced themselves", ttl)
        self._until[address] = now + ttl

    def listed(self, now: float) -> tuple[str, ...]:
        """Those whose time is not over."""
        self._until = {key: until for key, until in self._until.items() if until > now}
        return tuple(self._until)
