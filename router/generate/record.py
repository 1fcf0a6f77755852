"""What one request of a client got and how it ended, whatever it was made of; the access log.

No text and no token of a request is written.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Literal, TypeAlias

from kvrelay.errors import KvrelayError
from kvrelay.process import logs
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.status import code_of
from kvrelay.v1 import router_pb2

Door: TypeAlias = Literal["grpc", "http"]

SEPARATES = re.compile(r'[\s="]')
log = logging.getLogger("kvrelay.access")
log.setLevel(logging.INFO)  # written at any --log-level


class RequestRecord:
    """One call of ``Generate``, or one HTTP request with all its prompts. ``peer``: the client's
    address. ``failed``: the status that the client received instead of an answer. It is kept and
    not the error, which keeps the frames that it passed, and the message in them. What a usage
    tells is ``None`` until one has come.
    """

    def __init__(self, tenant: Tenant, door: Door, peer: str) -> None:
        self.tenant = tenant
        self.failed: str | None = None
        self._door = door
        self._peer = peer
        self._since = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = 0
        self._legs: int | None = None

    def fail(self, error: KvrelayError) -> None:
        """The client receives this error."""
        self.failed = name_of(error)

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """A response that goes to the client."""
        if response.tokens and self._first is None:
            self._first = time.monotonic() - self._since
        self._tokens += len(response.tokens)
        if response.HasField("usage"):
            self._prompt_tokens = (self._prompt_tokens or 0) + response.usage.prompt_tokens
            if not response.usage.HasField("cached_prompt_tokens"):
                self._cached_tokens = None
            elif self._cached_tokens is not None:
                self._cached_tokens += response.usage.cached_prompt_tokens
            self._legs = (self._legs or 0) + len(response.usage.legs)

    def write(self, ended: str) -> None:
        """Log the line: ``ended`` is "finished", "cancelled", or the status of the error."""
        fields: dict[str, object] = {
            "door": self._door,
            "peer": self._peer,
            "tenant": self.tenant.name,
            "ended": ended,
            "seconds": round(time.monotonic() - self._since, 4),
            "first_token_seconds": None if self._first is None else round(self._first, 4),
            "prompt_tokens": self._prompt_tokens,
            "cached_prompt_tokens": None if self._legs is None else self._cached_tokens,
            "completion_tokens": self._tokens,
            "legs": self._legs,
        }
        request_id = logs.served()
        shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.info("access %s %s", _shown(request_id), shown, extra=logs.about(request_id, **fields))


def name_of(error: KvrelayError) -> str:
    """How a request ended that this error ended."""
    return code_of(error).name.lower()


def _shown(value: object) -> str:
    """Quoted where it could be taken for another field of the line."""
    text = "" if value is None else str(value)
    return json.dumps(text) if SEPARATES.search(text) else text or "-"
