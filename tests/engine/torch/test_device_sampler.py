"""The sampler of a device chooses the tokens of the sampler of the CPU, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrelay.engine.core.updates import Sampled, Work
from kvrelay.engine.sampling.device import DeviceSampler
from kvrelay.engine.sampling.draw import draw, filters_of
from kvrelay.engine.sampling.masks import GrammarMasks
from kvrelay.engine.sampling.philox import uniform
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.sampling.tensor_philox import TensorPhilox
from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.sampling import Sampling
from tests.engine.cuda.processes import needs_a_gpu

CPU = torch.device("cpu")
ON_A_GPU = (pytest.mark.gpu, pytest.mark.triton, needs_a_gpu)
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=ON_A_GPU)]
WORD = 0xFFFFFFFF


class _Anything:
    """A grammar that the test's masks stand for."""

    def follow(self, tokens: object, first: int, last: int) -> None:
        raise AssertionError("the masks are given")

    @classmethod
    def masks(cls, grammars: object, threads: int) -> tuple[bytes, list[KvrelayError | None]]:
        raise AssertionError("the masks are given")


def drawn(rng: random.Random, size: int) -> Sampling:
    """Any sampling, each option off as often as on."""

    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    return Sampling(
        temperature=rng.choice((0.0, 0.3, 1.0, 1e-40, 7.5)),
        top_k=int(maybe(rng.randint(1, size + 3), 0)),
        top_p=maybe(rng.choice((1e-9, rng.uniform(0.01, 1.0))), 1.0),
        min_p=maybe(rng.random(), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2.0), 1.0),
        presence_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=maybe(rng.uniform(-2.0, 2.0), 0.0),
        seed=rng.choice((None, 0, rng.getrandbits(64), (1 << 64) - 1)),
        stop_token_ids=(1, 5),
        min_tokens=rng.choice((0, 20)),
        logprobs=rng.choice((None, None, 0, 3)),
        logit_bias={rng.randrange(size): rng.uniform(-5, 5) for _ in range(rng.choice((0, 4)))},
        bad_word_ids=rng.choice(((), ((2,), (3, 4)))),
    )


def on_device(
    logits: torch.Tensor,
    works: list[Work],
    masks: GrammarMasks | None = None,
    device: torch.device = CPU,
) -> list[Sampled]:
    """What the device's sampler makes, of a step whose works are in this order."""
    sampler = DeviceSampler(device, logits.shape[1])
    plan = sampler.plan(works, range(len(works)))
    words = [torch.from_numpy(part.copy()).to(device) for part in plan.words]
    return sampler.sample(logits.to(device), plan, words, masks)


def filters_nothing(sampling: Sampling | None) -> bool:
    return sampling is not None and sampling.top_p == 1.0 and sampling.min_p == 0.0


def same_but_for_rounding(mine: Sampled, theirs: Sampled) -> None:
    """A GPU has exponentials and logarithms of its own, and with them other thresholds."""
    assert mine.token == theirs.token
    assert (mine.logprob is None) == (theirs.logprob is None)
    assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert [one.token for one in mine.top] == [one.token for one in theirs.top]
    chances = [one.logprob for one in theirs.top]
    assert [one.logprob for one in mine.top] == pytest.approx(chances, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_is_an_error(
    bad: float, temperature: float, device: torch.device
) -> None:
    """Of its own request alone: the other rows have the same tokens as without it."""
    works = [
        Work([1, 2], 0, 2, (), 2, Sampling(temperature=temperature, seed=row, logprobs=2))
        for row in range(3)
    ]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    usual = [entry.token for entry in sample(logits, works)]
    logits[1, 7] = bad
    for found in (sample(logits, works), on_device(logits, works, None, device)):
        assert [entry.error is None for entry in found] == [True, False, True]
        assert type(found[1].error) is KvrelayError  # an error of ours, not of the request
        assert f"computed {bad} as a logit" in str(found[1].error)
        assert [found[0].token, found[2].token] == [usual[0], usual[2]]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("size", [12, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows(size: int, dtype: torch.dtype, device: torch.device) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(40):
        works = []
        for _ in range(rng.randint(1, 9)):
            tokens = [rng.randrange(size) for _ in range(rng.randint(2, 60))]
            prompt = rng.randint(1, len(tokens))
            works.append(Work(tokens, 0, len(tokens), (), prompt, drawn(rng, size)))
        logits = torch.randn(len(works), size, generator=generator) * rng.choice((0.1, 3.0, 30.0))
        logits = (logits * 4).round() / 4 if rng.random() < 0.3 else logits  # many are equal
        logits = logits.to(dtype)
        masks = None
        if rng.random() < 0.4:
            rows = [row for row in range(len(works)) if rng.random() < 0.6] or [0]
            works = [
                replace(work, grammar=_Anything()) if row in rows else work
                for row, work in enumerate(works)
            ]
            forbidden = np.array([[rng.random() < 0.5 for _ in range(size)] for _ in rows])
            forbidden[0] |= rng.random() < 0.3  # no token at all
            errors: dict[int, KvrelayError] = {}
            if rng.random() < 0.3:
                errors[rows[-1]] = Unavailable("of a grammar")
            masks = GrammarMasks(tuple(rows), forbidden, errors)
        want = sample(logits.clone(), works, masks)
        got = on_device(logits.clone(), works, masks, device)
        for work, mine, theirs in zip(works, got, want, strict=True):
            assert str(mine.error) == str(theirs.error)
            if mine.error is None and device == CPU:
                assert mine == theirs
            elif mine.error is None and filters_nothing(work.sampling):
                same_but_for_rounding(mine, theirs)


def test_rows_of_masks_follow_the_works_not_the_logits() -> None:
    """Rows of logits are packed in another order than the works whose masks are computed."""
    works = [
        Work([1], 0, 1, (), 1, Sampling(temperature=0.0), grammar)
        for grammar in (_Anything(), None, _Anything())
    ]
    samples = (2, 0, 1)  # row 0 is that of work 2, row 2 that of work 1
    forbidden = np.ones((2, 4), np.bool_)
    forbidden[0, 1] = False  # of the work 1: token 1
    forbidden[1, 3] = False  # of the work 2: token 3
    masks = GrammarMasks((1, 2), forbidden, {}).arranged(samples)
    sampler = DeviceSampler(CPU, 4)
    plan = sampler.plan(works, samples)
    words = [torch.from_numpy(part) for part in plan.words]
    made = sampler.sample(torch.zeros(3, 4), plan, words, masks)
    assert [one.token for one in made] == [3, 0, 1]
    assert made == sample(torch.zeros(3, 4), works, masks)


def test_philox_in_tensors() -> None:
    rng = random.Random(7)
    pairs = [(rng.getrandbits(64), rng.getrandbits(rng.choice((10, 40, 64)))) for _ in range(3000)]
    edges = (0, 1, WORD, WORD + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
    pairs += [(seed, position) for seed in edges for position in edges]
    words = [(s & WORD, s >> 32, p & WORD, p >> 32) for s, p in pairs]
    given = torch.from_numpy(np.array(words, np.uint32).view(np.int32))
    assert TensorPhilox(CPU).uniforms(given).tolist() == [uniform(s, p) for s, p in pairs]


@pytest.mark.parametrize("size", [1, 2, 257, 1500, 70_000])
def test_top_p_without_a_sort(size: int) -> None:
    """Halving the range of weights finds the weight that sorting them finds, ties included."""
    generator = torch.Generator().manual_seed(size)
    for scale in (0.0, 0.01, 1.0, 50.0):
        logits = torch.randn(6, size, generator=generator).mul(scale)
        logits[3:] = logits[3:].round()
        samplings = [Sampling(top_p=p) for p in (1e-12, 0.2, 0.5, 0.9, 0.999999, 1.0)]
        for number in (0.0, 0.37, 1.0 - 2.0**-53):
            filters = filters_of(samplings, [number] * 6, size)
            assert torch.equal(draw(logits, filters), draw(logits, filters, waits=False))


def test_sums_do_not_depend_on_an_order() -> None:
    """Summed backwards, the weights before a token are the same number."""
    from kvrelay.engine.sampling.draw import _whole

    weights = torch.rand(2, 262_144).exp().sub_(1.0).clamp_(0.0, 1.0)
    weights[:, 0] = 1.0
    whole = _whole(weights, weights.shape[1])
    assert int(whole.max()) == 1 << 44
    assert torch.equal(whole.cumsum(-1)[:, -1], whole.flip(-1).cumsum(-1)[:, -1])
    ones = _whole(torch.ones_like(weights), weights.shape[1])
    assert int(ones.sum(-1)[0]) == 1 << 62  # and not beyond int64
