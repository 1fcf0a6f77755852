"""One line for each request at its end: who asked at which door, how it ended, tokens and times.

No text and no token of a request is written.
"""

from __future__ import annotations

import logging
import time

from kvrelay.process import logs
from kvrelay.v1 import router_pb2
from router.generate.request import InboundCall

log = logging.getLogger("kvrelay.access")
log.setLevel(logging.INFO)  # written at any --log-level


class AccessLine:
    """What is known of one call; ``write`` it once."""

    def __init__(self, call: InboundCall) -> None:
        self._call = call
        self._since = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._usage = router_pb2.GenerateResponse().usage

    def take(self, response: router_pb2.GenerateResponse) -> None:
        """A response that goes to the client."""
        if response.tokens and self._first is None:
            self._first = time.monotonic() - self._since
        self._tokens += len(response.tokens)
        if response.HasField("usage"):
            self._usage = response.usage

    def write(self, ended: str) -> None:
        """The line: ``ended`` is "finished", "cancelled", or the status of the error."""
        call, usage = self._call, self._usage
        fields: dict[str, object] = {
            "door": call.door,
            "peer": call.peer,
            "tenant": call.tenant.name,
            "ended": ended,
            "seconds": round(time.monotonic() - self._since, 4),
            "first_token_seconds": None if self._first is None else round(self._first, 4),
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "completion_tokens": self._tokens,
            "legs": len(usage.legs),
        }
        request_id = logs.served()
        shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.info("access %s %s", request_id or "-", shown, extra=logs.about(request_id, **fields))


def _shown(value: object) -> object:
    return "-" if value in (None, "") else value
