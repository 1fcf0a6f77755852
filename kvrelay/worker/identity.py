"""Who a worker is: its role, and a boot token that is new at every start and every change of role.

A router takes another boot token for another worker, so nothing it believed of the role before
outlives the change.
"""

from __future__ import annotations

import secrets

from kvrelay.rpc.protocol import NAMES, Role


class WorkerIdentity:
    """Written by ``become`` alone."""

    def __init__(self, role: Role) -> None:
        self.started_as = role
        self.become(role)

    def become(self, role: Role) -> None:
        """Another worker from now on."""
        self._role = role
        self._boot = secrets.token_hex(8)

    @property
    def role(self) -> Role:
        """Of the legs taken now."""
        return self._role

    @property
    def boot(self) -> str:
        """The token."""
        return self._boot

    @property
    def name(self) -> str:
        """The role in words."""
        return NAMES[self._role]
