"""Errors named by whose fault they are; ``kvrelay.rpc.status`` maps them to gRPC codes.

Each says which field it is about and the way out. Foreign exceptions become one of these at the
boundary where they enter, and nowhere else.
"""

from __future__ import annotations


class KvrelayError(Exception):
    """Base of every error this project raises on purpose."""


class Rejected(KvrelayError):
    """The caller asked for something that can never be done: mend ``field`` and ask again."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(KvrelayError):
    """The thing named does not exist here."""


class Mismatch(KvrelayError):
    """Two parties do not agree on ``field``: they must not work together until they do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Exhausted(KvrelayError):
    """No room now: ask again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(KvrelayError):
    """The party asked is not there or is leaving: ask another, or later."""


class Draining(Unavailable):
    """The party asked is leaving in good order: go on elsewhere, nothing went wrong."""


class DeadlineExceeded(KvrelayError):
    """The time given ran out before the answer was there."""


class Corrupt(KvrelayError):
    """Bytes are not what they claim to be: treat as absent, and count."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unservable(KvrelayError):
    """This model cannot be served exactly by this engine; the message says why."""


class NotInstalled(KvrelayError):
    """A command or service needs packages that are not installed; the message names them."""
