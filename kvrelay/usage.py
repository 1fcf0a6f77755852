"""Why a block of KV could not be had from outside: the same words everywhere."""

from __future__ import annotations

from enum import Enum


class Miss(Enum):
    """The reason, as it stands in usages and as a metric's label; docs/accounting.md has a table.

    Of several blocks in a row the first one that was missed decides: those after it are of no use.
    """

    NEVER_STORED = "never_stored"  # since the store's start, as far back as it remembers
    EVICTED = "evicted"  # another block needed the room
    EXPIRED = "expired"  # a partial block whose life was over
    CLEARED = "cleared"  # somebody cleared the store
    OTHER_NAMESPACE = "other_namespace"  # the same tokens are there, of another model, dtype, ...
    FAILED_VERIFICATION = "failed_verification"  # it came, and was not what was wanted
    TOO_LATE = "too_late"  # it was there or on its way, and not here in time
    UNREACHABLE = "unreachable"  # the store did not answer
    UNKNOWN = "unknown"  # the store cannot tell, or was started anew
