"""Requests that workers died of, for a while: asking again must not kill the next ones. Pure.

A request is known by its tenant, its prompt and its sampling but for the seed, so tokens so far and
another seed do not make it another one.
"""

from __future__ import annotations

import hashlib
import struct

from kvrelay.v1 import types_pb2
from router.generate.request import AcceptedRequest
from router.generate.retry import PoisonRequest

MOST = 1024  # of them; the oldest are forgotten first


class PoisonList:
    """Each is refused for ``seconds``; time is passed in."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._noted: dict[bytes, float] = {}  # in order of time

    def note(self, request: AcceptedRequest, now: float) -> None:
        """Workers died of it."""
        digest = _digest(request)
        self._noted.pop(digest, None)
        self._noted[digest] = now
        while len(self._noted) > MOST:
            del self._noted[next(iter(self._noted))]

    def check(self, request: AcceptedRequest, now: float) -> None:
        """Raise ``PoisonRequest`` for one noted lately."""
        if not self._noted:
            return  # so nearly all pay nothing
        noted = self._noted.get(digest := _digest(request))
        if noted is None:
            return
        left = noted + self._seconds - now
        if left > 0:
            raise PoisonRequest(
                f"workers died while they served this request {now - noted:.0f} s ago: it is"
                f" refused for {left:.0f} s more"
            )
        del self._noted[digest]


def _digest(request: AcceptedRequest) -> bytes:
    sampling = types_pb2.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.ClearField("seed")
    prompt = struct.pack(f"<{len(request.prompt)}I", *request.prompt)
    parts = (request.tenant.name.encode(), sampling.SerializeToString(deterministic=True), prompt)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
