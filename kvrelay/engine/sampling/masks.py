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
    """Computes the masks of one step at a time for logits of ``vocab_size`` columns.

    ``threads``: of the library, which share the rows of a step.
    """

    def __init__(self, vocab_size: int, threads: int = 1) -> None:
        self._size = vocab_size
        self._threads = threads
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
        """The rows of one class of grammars in one call: the library computes them in parallel."""
        rows: list[int] = []
        errors: dict[int, KvrelayError] = {}
        ready: dict[type[OutputGrammar], list[tuple[int, OutputGrammar]]] = {}
        for row, work in enumerate(works):
            if work.grammar is None or work.sampling is None:
                continue
            rows.append(row)
            try:
                work.grammar.follow(work.tokens, work.prompt_len, work.start + work.count)
                ready.setdefault(type(work.grammar), []).append((len(rows) - 1, work.grammar))
            except KvrelayError as error:
                errors[row] = error
        forbidden = np.ones((len(rows), self._size), np.bool_)
        for kind, members in ready.items():
            places = [place for place, _ in members]
            packed, failed = kind.masks([grammar for _, grammar in members], self._threads)
            known = self._unpacked(packed, len(members))
            forbidden[places, : known.shape[1]] = known == 0
            given = zip(places, failed, strict=True)
            errors |= {rows[place]: error for place, error in given if error is not None}
        for place, row in enumerate(rows):
            if row in errors:
                forbidden[place] = False
            else:
                _avoid(forbidden[place], works[row])
        return GrammarMasks(tuple(rows), forbidden, errors)

    def _unpacked(self, packed: bytes | bytearray, rows: int) -> NDArray[np.uint8]:
        """Bits [rows, tokens known both here and to the grammars]."""
        lines = np.frombuffer(packed, np.uint8).reshape(rows, -1)
        return np.unpackbits(lines, axis=1, bitorder="little")[:, : self._size]


def _avoid(forbidden: Flags, work: Work) -> None:
    """Forbid endings in a row [vocab] while another token can follow.

    An end-of-sequence token may end a text that is complete. While the output is too short, or
    with ``ignore_eos``, it does so only if no other token can follow.
    """
    assert work.sampling is not None, "a row samples"
    endings = [token for token in _avoided(work, work.sampling) if token < forbidden.size]
    if not endings:
        return
    before = forbidden[endings]
    forbidden[endings] = True
    if forbidden.all():
        forbidden[endings] = before


def _avoided(work: Work, sampling: Sampling) -> Sequence[int]:
    """Endings that are sampled only if no other token can follow."""
    if before_minimum(work, sampling):
        return sampling.ending_token_ids
    if sampling.ignore_eos:
        return [token for token in sampling.eos_token_ids if token not in sampling.stop_token_ids]
    return ()
