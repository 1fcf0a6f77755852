"""Errors, named by whose fault they are; ``kvrelay.rpc.status`` maps them to gRPC codes.

A message names the field, the value and what to do. Exceptions of other libraries become one of
these classes where they enter, and nowhere else. All are exported from ``kvrelay``.
"""

from __future__ import annotations


class KvrelayError(Exception):
    """Base class of every error that kvrelay raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """For ``copy`` and process pools: those of ``Exception`` call the class with its text."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[KvrelayError], args: tuple[object, ...], fields: dict[str, object]
) -> KvrelayError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class Rejected(KvrelayError):
    """The request can never be served as it is: correct ``field`` and send it again."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(KvrelayError):
    """The model, block or other object named does not exist here."""


class Mismatch(KvrelayError):
    """Two parties disagree on ``field``: they must not work together until they agree."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Exhausted(KvrelayError):
    """No capacity now: retry after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(KvrelayError):
    """The peer does not answer or is shutting down: ask another one, or retry later."""


class Draining(Unavailable):
    """The peer shuts down in good order: continue elsewhere, nothing went wrong."""


class DeadlineExceeded(KvrelayError):
    """The deadline passed before the answer was complete."""


class Corrupt(KvrelayError):
    """Bytes fail their verification: treat the block or message as absent, and count it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unservable(KvrelayError):
    """This model, or a request of this size, cannot be served here until the operator acts.

    The message says why, and what would help.
    """


class NotInstalled(KvrelayError):
    """A command or service needs packages that are not installed; the message names them."""
