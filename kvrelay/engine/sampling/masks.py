"""The masks of structured output, computed in a thread while the model computes the logits.

The library holds no lock of the interpreter meanwhile. A step without a structured row starts no
thread and changes no logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.core.updates import OutputGrammar, Work
from kvrelay.engine.sampling.penalties import before_minimum
from kvrelay.errors import KvrelayError
from kvrelay.sampling import Sampling

Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """``forbidden`` [len(rows), vocab]: what each of ``rows`` must not sample.

    ``errors``: why a row has no mask. Rows are numbers of works, in ``arranged`` those of logits.
    """

    rows: tuple[int, ...]
    forbidden: Flags
    errors: dict[int, KvrelayError]

    def arranged(self, samples: Sequence[int]) -> GrammarMasks:
        """The same for logits whose row ``r`` is that of the work ``samples[r]``."""
        places = {work: row for row, work in enumerate(samples)}
        errors = {places[row]: error for row, error in self.errors.items()}
        return GrammarMasks(tuple(places[row] for row in self.rows), self.forbidden, errors)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A float32 copy of logits [R, vocab] in which forbidden tokens are impossible."""
        copy = logits.to(torch.float32, copy=True)
        forbidden = torch.from_numpy(self.forbidden).to(logits.device)
        rows = list(self.rows)
        if rows == list(range(copy.shape[0])):
            return copy.masked_fill_(forbidden, -torch.inf)
        copy[rows] = copy[rows].masked_fill_(forbidden, -torch.inf)
        return copy


class MaskThread:
    """Computes the masks of one step at a time for logits of ``vocab_size`` columns."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar masks")

    @contextmanager
    def computing(self, works: Sequence[Work]) -> Iterator[Callable[[], GrammarMasks | None]]:
        """Compute the masks of the works that sample, and yield what waits for them.

        Inside the context the works do not change.
        """
        if not any(work.grammar is not None and work.sampling is not None for work in works):
            yield lambda: None
            return
        future = self._thread.submit(self._masks, works)
        try:
            yield future.result
        finally:
            future.exception()  # the thread is done with the works, also if the step failed

    def _masks(self, works: Sequence[Work]) -> GrammarMasks:
        rows: list[int] = []
        errors: dict[int, KvrelayError] = {}
        masks: list[Flags] = []
        for row, work in enumerate(works):
            if work.grammar is None or work.sampling is None:
                continue
            rows.append(row)
            try:
                masks.append(self._forbidden(work, work.grammar, work.sampling))
            except KvrelayError as error:
                errors[row] = error
                masks.append(np.zeros(self._size, np.bool_))
        return GrammarMasks(tuple(rows), np.stack(masks), errors)

    def _forbidden(self, work: Work, grammar: OutputGrammar, sampling: Sampling) -> Flags:
        """What a row must not sample.

        An end-of-sequence token may end a text that is complete. While the output is too short, or
        with ``ignore_eos``, it does so only if no other token can follow.
        """
        packed = np.frombuffer(
            grammar.allowed(work.tokens, work.prompt_len, work.start + work.count), np.uint8
        )
        allowed = np.zeros(self._size, np.bool_)
        known = np.unpackbits(packed, bitorder="little")[: self._size]
        allowed[: known.size] = known
        endings = _avoided(work, sampling)
        if endings:
            rest = allowed.copy()
            rest[[token for token in endings if token < self._size]] = False
            if rest.any():
                allowed = rest
        return ~allowed


def _avoided(work: Work, sampling: Sampling) -> Sequence[int]:
    """Endings that are sampled only if no other token can follow."""
    if before_minimum(work, sampling):
        return sampling.ending_token_ids
    if sampling.ignore_eos:
        return [token for token in sampling.eos_token_ids if token not in sampling.stop_token_ids]
    return ()
