"""Samples on the device: what it needs comes with the step's upload, one table is read back.

The tokens are those of ``sampling.sampler`` for the same logits; only the functions ``exp`` and
``log_softmax`` are the device's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.core.updates import Logprob, Sampled, Work
from kvrelay.engine.cuda.upload import StepUpload
from kvrelay.engine.sampling.draw import Filters, draw, temperature_of, top_k_of
from kvrelay.engine.sampling.masks import Flags, GrammarMasks
from kvrelay.engine.sampling.penalties import Row, adjust, adjustments
from kvrelay.engine.sampling.sampler import adjusts, impossible, sampling_of
from kvrelay.engine.sampling.tensor_philox import TensorPhilox
from kvrelay.sampling import Sampling

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What R rows ask for, in host memory; ``words`` are what the device needs.

    ``drawn`` rows have a temperature. ``words``: the drawn rows, their eight numbers each, the
    seven parts of the adjustments, and the rows with a grammar, in the order of the works.
    """

    asked: tuple[Row, ...]
    drawn: tuple[int, ...]
    largest_k: int
    cuts: bool
    floors: bool
    adjusts: bool
    words: tuple[NDArray[np.int32], ...]

    def read(self, table: NDArray[np.int32], masks: GrammarMasks | None) -> list[Sampled]:
        """The results out of the words that were read back."""
        rows = len(self.asked)
        tokens, highest, rest = np.split(table, (rows, 2 * rows))
        errors = impossible(highest.view(np.float32).tolist(), masks)
        made = []
        for token, (row, _, sampling) in zip(tokens.tolist(), self.asked, strict=True):
            count = sampling.logprobs
            if count is None:
                made.append(Sampled(token, error=errors.get(row)))
                continue
            own, numbers, best = np.split(rest[: 1 + 2 * count], (1, 1 + count))
            rest = rest[1 + 2 * count :]
            if row in errors:
                made.append(Sampled(token, error=errors[row]))
                continue
            pairs = zip(best.tolist(), numbers.view(np.float32).tolist(), strict=True)
            possible = (Logprob(t, p) for t, p in pairs if p > -math.inf)
            top = sorted(possible, key=lambda one: (-one.logprob, one.token))
            made.append(Sampled(token, float(own.view(np.float32)[0]), tuple(top)))
        return made


class DeviceSampler:
    """Samples rows of ``size`` logits on one device."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._philox = TensorPhilox(device)
        self._size = size
        self._masks = StepUpload(device)
        self._bits = torch.tensor(range(8), dtype=torch.uint8, device=device)

    def plan(self, works: Sequence[Work], samples: Sequence[int]) -> SamplingPlan:
        """The plan for logits of these works; ``samples`` are their numbers in the step."""
        asked = tuple((row, work, sampling_of(work)) for row, work in enumerate(works))
        drawn = [entry for entry in asked if entry[2].temperature > 0]
        limits = [top_k_of(sampling, self._size) for _, _, sampling in drawn]
        restricted = [row for row, work, _ in asked if work.grammar is not None]
        restricted.sort(key=lambda row: samples[row])
        numbers = np.array([self._numbers(work, s) for _, work, s in drawn], np.uint32)
        return SamplingPlan(
            asked=asked,
            drawn=tuple(row for row, _, _ in drawn),
            largest_k=max((limit for limit in limits if limit < self._size), default=0),
            cuts=any(sampling.top_p < 1.0 for _, _, sampling in drawn),
            floors=any(sampling.min_p > 0.0 for _, _, sampling in drawn),
            adjusts=any(adjusts(work, sampling) for _, work, sampling in asked),
            words=(
                np.array([row for row, _, _ in drawn], np.int32),
                numbers.view(np.int32).reshape(-1, 8),
                *adjustments(asked, self._size).words,
                np.array(restricted, np.int32),
            ),
        )

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        words: Sequence[torch.Tensor],
        masks: GrammarMasks | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Sampled]:
        """One token for each row of logits [R, vocab]; ``words`` are those of the plan.

        The table is the only thing that is read back, once. ``meanwhile`` is called before that,
        when all is launched. Masks are a second upload: they are computed during the forward pass.
        """
        drawn, numbers, *changes, restricted = words
        if masks is not None:
            at = restricted.long()
            logits = logits.to(torch.float32, copy=True)
            logits[at] = logits[at].masked_fill_(self._uploaded(masks.forbidden), -torch.inf)
        final = logits.float()
        if plan.adjusts:
            final = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            adjust(final, changes)
        highest, tokens = final.max(-1)  # the first of equal ones; a NaN is the largest
        if plan.drawn:
            at = drawn.long()
            picked = final if len(plan.drawn) == len(plan.asked) else final[at]
            tokens[at] = draw(picked, self._filters(numbers, plan), waits=False)
        table = [tokens.int(), highest.view(torch.int32)]
        table += self._reports(logits, tokens, plan)
        joined = torch.cat(table)
        meanwhile()
        return plan.read(joined.cpu().numpy(), masks)

    def _uploaded(self, flags: Flags) -> torch.Tensor:
        """Flags [rows, vocab] on the device, eight in a byte on the way."""
        packed = np.packbits(flags, axis=1, bitorder="little")
        whole = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4))).view(np.int32)
        there = self._masks.send([whole])[0].view(torch.uint8)
        bits = (there[:, :, None] >> self._bits) & 1
        return bits.view(torch.bool).view(len(flags), -1)[:, : self._size]

    def _filters(self, numbers: torch.Tensor, plan: SamplingPlan) -> Filters:
        floats = numbers.view(torch.float32)
        return Filters(
            temperatures=floats[:, 4:5],
            top_k=numbers[:, 5:6].long(),
            top_p=floats[:, 6:7],
            min_p=floats[:, 7:8],
            uniforms=self._philox.uniforms(numbers[:, :4])[:, None],
            largest_k=plan.largest_k,
            cuts=plan.cuts,
            floors=plan.floors,
        )

    @staticmethod
    def _reports(
        logits: torch.Tensor, tokens: torch.Tensor, plan: SamplingPlan
    ) -> Iterator[torch.Tensor]:
        """For each row that asks: the token's log probability, the best, and their tokens."""
        for row, _, sampling in plan.asked:
            if sampling.logprobs is not None:
                logprobs = logits[row].float().log_softmax(-1)
                best = logprobs.topk(sampling.logprobs)
                own = logprobs.gather(0, tokens[row : row + 1])
                yield torch.cat((own, best.values)).view(torch.int32)
                yield best.indices.int()

    def _numbers(self, work: Work, sampling: Sampling) -> tuple[int, ...]:
        seed, position = sampling.seed or 0, work.start + work.count
        floats = np.array(
            (temperature_of(sampling), sampling.top_p, sampling.min_p), np.float32
        ).view(np.uint32)
        return (
            *(seed & _WORD, seed >> 32, position & _WORD, position >> 32, int(floats[0])),
            *(top_k_of(sampling, self._size), int(floats[1]), int(floats[2])),
        )
