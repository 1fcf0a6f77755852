"""What the loop keeps of one request beside its accounting: text, times, what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.engine.core.external import BlockContent, Loaded, Save
from kvrelay.engine.core.request import Admission, Request
from kvrelay.engine.core.sources import apportion
from kvrelay.engine.core.updates import Ended, Missed, Timing
from kvrelay.engine.core.usage import first_run, leg_tokens, missed_blocks
from kvrelay.sampling import Sampling
from kvrelay.usage import Miss


class StopChecker(Protocol):
    """The output's text, watched for stop strings."""

    def stops_at(self, token: int) -> bool:
        """Whether ``token``, the next one, completes a stop string."""


@dataclass(eq=False, slots=True)
class LegRecord:
    """One request in the engine. Times are the loop's clock, in seconds."""

    request: Request
    sampling: Sampling
    stop_text: StopChecker | None
    submitted: float
    epoch: int = 0  # of the last admission that was noted
    why: Miss | None = None  # what it found outside ended there for this reason
    missed: Missed | None = None  # by the admission that made the first token
    admitted: float | None = None
    running: float | None = None
    first_token: float | None = None
    preemptions: int = 0
    open_saves: int = 0
    stored: set[bytes] = field(default_factory=set)
    tail: BlockContent | None = None  # the partial last block, once it is on its way to the store
    sources: dict[int, Mapping[str, int]] = field(default_factory=dict)  # of loads, by epoch

    def note_admitted(self, epoch: int, why: Miss | None, now: float) -> None:
        """An admission; one that did not ask again has its last reason."""
        self.epoch = epoch
        self.why = why or self.why
        if self.admitted is None:
            self.admitted = now

    def note_first_token(self, admission: Admission, block_size: int, now: float) -> None:
        """The first token was made out of ``admission``, once."""
        self.first_token = now
        blocks = missed_blocks(admission, block_size)
        self.missed = Missed(self.why, blocks) if self.why is not None and blocks else None

    def note_saving(self, save: Save, block_size: int) -> None:
        """A save has begun."""
        self.open_saves += 1
        if len(save.pieces[-1].tokens) < block_size:
            self.tail = save.pieces[-1]

    def note_saved(self, save: Save, stored: int) -> None:
        """A save has ended, with its first ``stored`` pieces in the store."""
        self.open_saves -= 1
        self.stored.update(piece.name for piece in save.pieces[: max(stored, 0)])

    def note_loaded(self, names: Sequence[bytes], event: Loaded) -> None:
        """These blocks came from the store, so there they are; and why no more came."""
        self.stored.update(names)
        self.why = event.missed or self.why
        admission = self.request.resident.admission
        self.sources[admission.epoch] = apportion(event.sources, admission.external)

    def sources_of(self, admission: Admission) -> Mapping[str, int]:
        """The external tokens of an admission, by store."""
        return self.sources.get(admission.epoch, {})

    def ended(self, block_size: int) -> Ended:
        """The account of the finished request."""
        pieces = [(name, block_size) for name in self.request.names]
        if self.tail is not None:
            pieces.append((self.tail.name, len(self.tail.tokens)))
        saved, last = 0, None
        for name, count in pieces:
            if name not in self.stored:
                break
            saved, last = saved + count, name
        first = first_run(self.request)
        return Ended(
            leg_tokens(self.request),
            self._timing(),
            self.preemptions,
            saved,
            last,
            {} if first is None else self.sources_of(first.admission),
            self.missed,
        )

    def _timing(self) -> Timing:
        admitted = self.submitted if self.admitted is None else self.admitted
        running = admitted if self.running is None else self.running
        first = running if self.first_token is None else self.first_token
        return Timing(admitted - self.submitted, running - admitted, first - running)
