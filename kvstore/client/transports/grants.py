"""What the store wants of the blocks it was offered, and what became of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import NOT_SENT, Offer, Outcome
from kvstore.claims import ClaimStatus
from kvstore.wire.messages import VERDICTS, claim_message

FORGO_SECONDS = 1.0

_RESERVED = VERDICTS[ClaimStatus.RESERVED]
_OUTCOMES = {VERDICTS[verdict]: Outcome(kept) for verdict, kept in NOT_SENT.items()}
_KNOWN = {_RESERVED, *_OUTCOMES}


@dataclass(frozen=True, slots=True)
class PutTicket:
    """What ``Reserve`` gave, at the store's start ``boot``."""

    serial: int
    token: bytes
    boot: bytes


def reserve_request(offers: Sequence[Offer], wait: float = 0.0) -> pb.ReserveRequest:
    """``Reserve`` for ``offers``, to wait up to so many seconds for other writers."""
    return pb.ReserveRequest(claims=map(claim_message, offers), wait_ms=round(wait * 1000))


class Reserver(Protocol):
    """The gRPC side."""

    def forgo(self, ticket: int, timeout: float) -> None:
        """Give up a reservation."""


class PutGrant:
    """The answer to ``Reserve``; ``Corrupt`` if it is not one for ``offers``."""

    def __init__(self, answer: pb.ReserveResponse, offers: Sequence[Offer]) -> None:
        self.ticket = PutTicket(answer.ticket, answer.proof, answer.boot)
        self._verdicts = list(answer.verdicts)
        if len(self._verdicts) != len(offers):
            raise Corrupt("verdicts", f"{len(self._verdicts)} came for {len(offers)} blocks")
        if not _KNOWN.issuperset(self._verdicts):
            raise Corrupt("verdicts", f"{set(self._verdicts) - _KNOWN} are not known")
        self.wanted = [o for o, v in zip(offers, self._verdicts, strict=True) if v == _RESERVED]

    def outcomes(self, sent: Iterator[Outcome]) -> list[Outcome]:
        """Of all the offers, given those of what was wanted."""
        return [next(sent) if v == _RESERVED else _OUTCOMES[v] for v in self._verdicts]


@contextmanager
def abandoned_on_error(calls: Reserver, granted: PutGrant, deadline: Deadline) -> Iterator[None]:
    """What gRPC reserved is given up when the way it was reserved for breaks.

    The store may not know that way as the ticket's, and would keep the blocks from all others.
    """
    try:
        yield
    except (Unavailable, Corrupt):
        if granted.wanted and (left := deadline.earlier(FORGO_SECONDS).remaining()):
            with suppress(KvrelayError):  # it ends by its deadline
                calls.forgo(granted.ticket.serial, left)
        raise
