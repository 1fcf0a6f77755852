"""Responses that do not parse: asyncio gRPC logs them and hands out ``None`` in their place."""

from __future__ import annotations

from typing import TypeVar

from kvrelay.errors import Corrupt

M = TypeVar("M")


def received(message: M | None, sender: str) -> M:
    """The message, or ``Corrupt`` naming who sent bytes that are none."""
    if message is None:
        raise Corrupt("response", f"{sender} sent bytes that are no message of this method")
    return message
