"""Reservations from the client's side: which offered blocks the store wants, and the outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Offer, Outcome, PutStatus
from kvstore.client.calls import StoreCalls
from kvstore.wire.messages import VERDICTS, claim_message

ABANDON_SECONDS = 1.0

_RESERVED = VERDICTS[PutStatus.RESERVED]
_OUTCOMES = {
    VERDICTS[status]: Outcome(status)
    for status in (PutStatus.EXISTED, PutStatus.PENDING, PutStatus.NO_ROOM, PutStatus.NO_PARENT)
}
_KNOWN = {_RESERVED, *_OUTCOMES}


@dataclass(frozen=True, slots=True)
class PutTicket:
    """The right to send reserved blocks, given by ``Reserve`` at the store's start ``boot``."""

    serial: int
    proof: bytes
    boot: bytes


def reserve_request(offers: Sequence[Offer], wait: float = 0.0) -> pb.ReserveRequest:
    """``Reserve`` for ``offers``; the store waits up to ``wait`` seconds for other writers."""
    return pb.ReserveRequest(claims=map(claim_message, offers), wait_ms=round(wait * 1000))


class PutGrant:
    """The answer to ``Reserve`` for ``offers``; ``Corrupt`` if it does not fit them."""

    def __init__(self, answer: pb.ReserveResponse, offers: Sequence[Offer]) -> None:
        self.ticket = PutTicket(answer.ticket, answer.proof, answer.boot)
        self._verdicts = list(answer.verdicts)
        if len(self._verdicts) != len(offers):
            raise Corrupt(
                "verdicts", f"{len(self._verdicts)} were answered for {len(offers)} blocks"
            )
        if not _KNOWN.issuperset(self._verdicts):
            raise Corrupt("verdicts", f"{set(self._verdicts) - _KNOWN} are not known")
        self.wanted = [o for o, v in zip(offers, self._verdicts, strict=True) if v == _RESERVED]

    def outcomes(self, sent: Iterator[Outcome]) -> list[Outcome]:
        """The outcomes of all offers, given those of the wanted blocks that were sent."""
        return [next(sent) if v == _RESERVED else _OUTCOMES[v] for v in self._verdicts]


@contextmanager
def abandoned_on_error(calls: StoreCalls, granted: PutGrant, deadline: Deadline) -> Iterator[None]:
    """Abandon a reservation when the transport that should send its blocks fails.

    The store may not have seen the ticket on that transport, so its end would not release the
    blocks for other writers.
    """
    try:
        yield
    except (Unavailable, Corrupt):
        if granted.wanted and (left := deadline.earlier(ABANDON_SECONDS).remaining()):
            with suppress(KvrelayError):  # the reservation ends by its deadline
                calls.abandon(granted.ticket.serial, left)
        raise
