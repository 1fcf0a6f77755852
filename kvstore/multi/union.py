"""The union of several backends: each block belongs to the first backend that has it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.usage import Miss
from kvstore.base import Lease, LookupResult, SurveyResult, Tail

Answers = Mapping[str, SurveyResult]
"""By backend, the preferred one first."""


def owners(answers: Answers, count: int) -> list[str | None]:
    """For each of ``count`` blocks, the backend to get it from; ``None``: absent."""
    chosen: list[str | None] = [None] * count
    for name, seen in reversed(list(answers.items())):
        pairs = zip(seen.sizes, chosen, strict=True)
        chosen = [owner if size is None else name for size, owner in pairs]
    return chosen


def united(answers: Answers, leading: int, tails: Sequence[Tail]) -> LookupResult:
    """The lookup result of all backends: ``leading`` names were asked about, then the tails."""
    having = owners(answers, leading + len(tails))
    lead = next((i for i in range(leading) if having[i] is None), leading)
    tail = next((i for i, t in enumerate(tails) if t.after == lead and having[leading + i]), None)
    used = [*range(lead), *([] if tail is None else [leading + tail])]
    sources = tuple(owner for i in used if (owner := having[i]) is not None)
    sizes = tuple(answers[owner].sizes[i] or 0 for i, owner in zip(used, sources, strict=True))
    lease = lease_of(answers, set(sources))
    wanted = [i for i, t in enumerate(tails, leading) if t.after == lead]
    if tail is not None or (lead == leading and not wanted):
        return LookupResult(lead, tail, sizes, lease, sources, None)
    wanted += [lead] if lead < leading else []
    return LookupResult(lead, tail, sizes, lease, sources, _why(answers, wanted, lead == 0))


def _why(answers: Answers, wanted: Sequence[int], first: bool) -> Miss:
    """Why every block ``wanted``, each an alternative for the same positions, is absent.

    A reason known to one backend counts more than that another one never had the block.
    """
    reasons = [
        seen.misses[i] or Miss.UNKNOWN if seen.misses else Miss.UNKNOWN
        for seen in answers.values()
        for i in wanted
    ]
    known = (miss for miss in reasons if miss not in (Miss.NEVER_STORED, Miss.UNKNOWN))
    if (reason := next(known, None)) is not None:
        return reason
    if first and (elsewhere := _first_block(answers)) is not None:
        return elsewhere
    return Miss.UNKNOWN if Miss.UNKNOWN in reasons else Miss.NEVER_STORED


def surveyed(answers: Answers, count: int) -> SurveyResult:
    """The survey result of all backends."""
    having = owners(answers, count)
    sizes = tuple(
        None if owner is None else answers[owner].sizes[i] for i, owner in enumerate(having)
    )
    lease = lease_of(answers, {owner for owner in having if owner is not None})
    misses = tuple(
        _why(answers, [i], False) if owner is None else None for i, owner in enumerate(having)
    )
    return SurveyResult(sizes, lease, misses, _first_block(answers))


def _first_block(answers: Answers) -> Miss | None:
    """What the backends know of the first block elsewhere; the closest namespace counts."""
    known = [seen.first_block for seen in answers.values() if seen.first_block is not None]
    return Miss.OTHER_NUMERICS if Miss.OTHER_NUMERICS in known else next(iter(known), None)


def lease_of(answers: Answers, used: set[str]) -> Lease | None:
    """The leases of the backends that are ``used``, as one that ends with the first of them."""
    parts = tuple(
        (name, seen.lease)
        for name, seen in answers.items()
        if name in used and seen.lease is not None
    )
    if not parts:
        return None
    return Lease(0, boot_of(parts), min(lease.deadline for _, lease in parts), parts)


def boot_of(parts: Sequence[tuple[str, Lease]]) -> bytes:
    """The boots of all backends of a lease, as one."""
    return b"".join(lease.boot for _, lease in parts)
