"""What of the next step follows from a plan whose tokens are not known yet."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.engine.core.plan import Entry, Plan
from kvrelay.engine.core.request import Request, RequestState

Foreseen = Mapping[Request, Entry]
NOTHING: Foreseen = {}


def entries_ahead(plan: Plan, block_size: int) -> Foreseen:
    """The next entries of requests that decode on in the blocks they have.

    A request that ends before, with its token or otherwise, is not running then, and its entry is
    void. All others advance by just what the plan computes, so that their entries hold.
    """
    found: dict[Request, Entry] = {}
    for entry in plan.entries:
        request, start = entry.request, entry.start + entry.count
        if not entry.samples or not request.resides(entry.epoch, RequestState.RUNNING):
            continue
        if start < len(request.resident.blocks) * block_size:
            found[request] = Entry(request, entry.epoch, start, 1, True)
    return found
