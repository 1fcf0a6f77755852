"""What the commands that talk to a router have in common: which one, and who asks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.cluster.endpoints import router_of
from kvrelay.config.reader import option
from kvrelay.errors import Rejected
from kvrelay.rpc.address import DEFAULT_ROUTER
from kvrelay.rpc.security import policy
from kvrelay.rpc.security.credentials import ADMIN_FIRST
from kvrelay.rpc.security.options import SecurityOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(SecurityOptions):
    """Which router."""

    router: str | None = option(None, f"the router; else {DEFAULT_ROUTER}", metavar="HOST:PORT")
    endpoints: str | None = option(None, "take the router from kvrelay up's file", metavar="FILE")

    def __post_init__(self) -> None:
        if self.router is not None and self.endpoints is not None:
            raise Rejected("router", "give either --router or --endpoints")

    def address(self) -> str:
        """The router's, once this process shows who it is."""
        policy.install(self, ADMIN_FIRST)
        if self.endpoints is not None:
            return router_of(Path(self.endpoints))
        return self.router or DEFAULT_ROUTER
