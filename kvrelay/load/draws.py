"""What is drawn: lengths of prompts and answers, and the moments at which requests are due."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.errors import Rejected

LONGEST = 1 << 20  # tokens
LENGTHS = "N, LOW-HIGH, exp:MEAN, normal:MEAN:SD or lognormal:MEDIAN:SIGMA"
PARTS = {"fixed": 1, "uniform": 2, "exp": 1, "normal": 2, "lognormal": 2}


@dataclass(frozen=True, slots=True)
class LengthDraw:
    """A distribution of token counts; what is drawn is at least ``low``."""

    kind: str
    numbers: tuple[float, ...]
    low: int = 1

    @classmethod
    def parse(cls, field: str, text: str, low: int = 1) -> LengthDraw:
        """``Rejected`` names the field if the text is none of ``LENGTHS``."""
        kind, *words = text.split(":")
        if not words:
            words = kind.split("-")
            kind = "fixed" if len(words) == 1 else "uniform"
        try:
            numbers = tuple(float(word) for word in words)
        except ValueError:
            numbers = ()
        ordered = kind != "uniform" or numbers == tuple(sorted(numbers))
        within = all(0 <= number <= LONGEST for number in numbers)
        if len(numbers) != PARTS.get(kind) or not within or not ordered:
            raise Rejected(field, f"{text!r}: wanted is {LENGTHS}, at most {LONGEST} tokens")
        return cls(kind, numbers, low)

    def draw(self, chance: random.Random) -> int:
        first, second = self.numbers[0], self.numbers[-1]
        match self.kind:
            case "uniform":
                drawn = float(chance.randint(int(first), int(second)))
            case "exp":
                drawn = chance.expovariate(1 / first) if first else 0.0
            case "normal":
                drawn = chance.gauss(first, second)
            case "lognormal":
                exponent = min(chance.gauss(0.0, second), 50.0)
                drawn = first * math.exp(exponent)
            case _:
                drawn = first
        return round(min(max(drawn, self.low), LONGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A renewal process with ``rate`` arrivals a second.

    ``burstiness`` is the shape of its gamma distribution of gaps: 1 is Poisson, less comes in
    bursts, ``None`` has constant gaps. With ``ramp_from`` the rate grows, or falls, linearly from
    there during ``seconds``; the gaps are then those of the process with unit rate, stretched.
    """

    rate: float
    burstiness: float | None = 1.0
    ramp_from: float | None = None
    seconds: float = 0.0

    def times(self, chance: random.Random) -> Iterator[float]:
        """Seconds from the start, without end."""
        arrived = 0.0
        while True:
            shape = self.burstiness
            arrived += 1.0 if shape is None else chance.gammavariate(shape, 1 / shape)
            yield self._when(arrived)

    def _when(self, arrived: float) -> float:
        """The moment until which so many requests are expected."""
        begin = self.ramp_from
        if begin is None or begin == self.rate:
            return arrived / self.rate
        expected = (begin + self.rate) / 2 * self.seconds
        if arrived > expected:
            return self.seconds + (arrived - expected) / self.rate
        slope = (self.rate - begin) / self.seconds
        return (math.sqrt(begin * begin + 2 * slope * arrived) - begin) / slope
