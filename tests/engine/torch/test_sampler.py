"""The sampler against a slow, plain reference in Python floats, and its promises one by one."""

from __future__ import annotations

import math
import mmap
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvrelay.engine.core.updates import Work
from kvrelay.engine.sampling.penalties import adjust, adjustments
from kvrelay.engine.sampling.philox import uniform
from kvrelay.engine.sampling.sampler import sample
from kvrelay.sampling import Sampling

VOCAB = 61


def work(sampling: Sampling, tokens: Sequence[int] = (1, 2, 3), prompt_len: int = 2) -> Work:
    """A work whose sample stands right after all its tokens."""
    return Work(tokens, len(tokens) - 1, 1, [0] * len(tokens), prompt_len, sampling)


def reference(logits: list[float], asked: Work) -> int:
    """What one row must give, by the definition of every field."""
    s = asked.sampling
    assert s is not None
    row = list(logits)
    seen, made = set(asked.tokens), list(asked.tokens[asked.prompt_len :])
    output = Counter(made)
    for word in s.bad_word_ids:
        if [*made, word[-1]][-len(word) :] == list(word):
            row[word[-1]] = -math.inf
    if len(made) < s.min_tokens:
        for token in s.ending_token_ids:
            row[token] = -math.inf
    for token, bias in s.logit_bias.items():
        row[token] += bias
    for token in seen:
        r = s.repetition_penalty
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token, count in output.items():
        row[token] -= s.presence_penalty + count * s.frequency_penalty
    if s.temperature == 0:
        return row.index(max(row))
    probs = normal([math.exp((x - max(row)) / s.temperature) for x in row])
    if s.top_k:
        floor = sorted(probs, reverse=True)[min(s.top_k, VOCAB) - 1]
        probs = normal([p if p >= floor else 0.0 for p in probs])
    if s.top_p < 1:
        mass, floor = 0.0, 0.0
        for p in sorted(probs, reverse=True):
            mass, floor = mass + p, p
            if mass >= s.top_p:
                break
        probs = normal([p if p >= floor else 0.0 for p in probs])
    floor = s.min_p * max(probs)
    probs = normal([p if p >= floor else 0.0 for p in probs])
    mass, number = 0.0, uniform(s.seed or 0, len(asked.tokens))
    for token, p in enumerate(probs):
        mass += p
        if mass > number:
            return token
    return max(token for token, p in enumerate(probs) if p > 0)


def normal(weights: list[float]) -> list[float]:
    """Weights that sum to 1."""
    total = sum(weights)
    return [weight / total for weight in weights]


def random_sampling(rng: random.Random) -> Sampling:
    """Every field on or off, at random."""
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 3, 20, 500]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.7, 1.8]),
        presence_penalty=rng.choice([0.0, 0.0, -1.5, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.5, 0.9]),
        seed=rng.getrandbits(64),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 2)),
        eos_token_ids=(5,),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 4, 9]),
        logit_bias=random_biases(rng),
        bad_word_ids=tuple(
            tuple(rng.randrange(6) for _ in range(rng.randint(1, 3)))
            for _ in range(rng.choice([0, 0, 1, 12]))
        ),
    )


def random_biases(rng: random.Random) -> dict[int, float]:
    """None, a few, or of the whole vocabulary."""
    tokens = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 5, VOCAB]))
    return {token: rng.choice([-100.0, 100.0, 0.0, rng.uniform(-4, 4)]) for token in tokens}


def cases(seed: int, count: int) -> tuple[torch.Tensor, list[Work]]:
    """Rows of logits and a work for each."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    works = []
    for _ in range(count):
        largest = rng.choice([6, VOCAB])  # few tokens: bad words begin often
        tokens = [rng.randrange(largest) for _ in range(rng.randint(2, 20))]
        works.append(work(random_sampling(rng), tokens, rng.randint(1, len(tokens))))
    return torch.randn(count, VOCAB, generator=generator) * 3, works


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_reference(seed: int) -> None:
    logits, works = cases(seed, 60)
    got = [sampled.token for sampled in sample(logits, works)]
    assert got == [reference(row.tolist(), w) for row, w in zip(logits, works, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_depend_on_its_neighbours(seed: int) -> None:
    logits, works = cases(seed, 70)
    works = [
        replace(w, sampling=replace(w.sampling, logprobs=i % 4)) if w.sampling and i % 3 else w
        for i, w in enumerate(works)
    ]
    together = sample(logits, works)
    order = random.Random(seed).sample(range(70), 70)
    shuffled = sample(logits[order], [works[i] for i in order])
    assert [together[i] for i in order] == shuffled
    assert together == [sample(logits[i : i + 1], [works[i]])[0] for i in range(70)]


def test_logits_are_not_changed() -> None:
    logits, works = cases(1, 30)
    before = logits.clone()
    sample(logits, works)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, VOCAB, dtype=dtype)
    logits[1, [7, 30]] = 2.0
    logits[2, 60] = 1.0
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.0, presence_penalty=1e-9)):
        assert [s.token for s in sample(logits, [work(sampling, (50,), 1)] * 3)] == [0, 7, 60]


@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_the_argmax_of_torch(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 2.0])
    for _ in range(50):
        rows, size = torch.randint(1, 40, (2,), generator=draw).tolist()
        chosen = torch.randint(0, 2 + seed % 6, (rows, size), generator=draw)
        logits = special.roll(-seed)[chosen]
        works = [work(Sampling(temperature=0.0)) for _ in range(rows)]
        assert [s.token for s in sample(logits, works)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits, _ = cases(2, 50)
    logits *= 1e4
    works = [work(Sampling(temperature=temperature, seed=i)) for i in range(50)]
    assert [s.token for s in sample(logits, works)] == logits.argmax(-1).tolist()


def test_huge_temperature_is_uniform() -> None:
    logits, _ = cases(3, 1)
    flat = Sampling(temperature=1e300, eos_token_ids=(0,), min_tokens=9)
    works = [work(replace(flat, seed=i)) for i in range(4000)]
    counts = Counter(s.token for s in sample(logits.expand(4000, -1), works))
    assert set(counts) == set(range(1, VOCAB))
    assert max(counts.values()) < 2.5 * 4000 / VOCAB


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(20_000, -1)
    tokens = [[0] * (1 + i % 400) for i in range(20_000)]
    works = [work(Sampling(seed=i // 400), t, 1) for i, t in enumerate(tokens)]
    counts = Counter(s.token for s in sample(logits, works))
    assert [counts[t] / 20_000 for t in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


def test_one_token_survives_every_filter() -> None:
    logits, _ = cases(4, 40)
    strict = Sampling(top_k=1, top_p=1e-9, min_p=1.0)
    works = [work(replace(strict, seed=i)) for i in range(40)]
    assert [s.token for s in sample(logits, works)] == logits.argmax(-1).tolist()


def test_top_p_beyond_the_first_look() -> None:
    """A flat distribution over 3,000 tokens needs more than the most likely 256."""
    logits = torch.zeros(1, 3000)
    logits[0, 2990:] = -1e-3
    drawn = {sample(logits, [work(Sampling(top_p=0.999, seed=i))])[0].token for i in range(300)}
    assert len(drawn) > 200
    assert max(drawn) > 2900


def test_rows_of_nan_and_infinity_stay_in_the_vocabulary() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0] = torch.nan
    logits[1, 4] = torch.inf
    beside = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    for sampling in (Sampling(seed=3, top_p=0.9, top_k=9, min_p=0.1), Sampling(temperature=0.0)):
        works = [work(sampling)] * 4
        got = [s.token for s in sample(torch.cat((logits, beside)), works)]
        assert all(0 <= token < VOCAB for token in got)
        assert got[3] == sample(beside, works[:1])[0].token


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e39, 1e300])
@pytest.mark.parametrize("logit", [-9.0, 0.0, 9.0])
def test_no_repetition_penalty_makes_a_logit_infinite(penalty: float, logit: float) -> None:
    logits = torch.full((1, VOCAB), logit)
    (got,) = sample(logits, [work(Sampling(temperature=0.0, repetition_penalty=penalty))])
    assert got.error is None


def test_min_tokens_forbids_endings_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    sampling = Sampling(temperature=0.0, eos_token_ids=(5,), min_tokens=2)
    outputs = [sample(logits, [work(sampling, [1, 2] + [3] * n, 2)])[0].token for n in range(4)]
    assert outputs == [0, 0, 5, 5]
    free = replace(sampling, ignore_eos=True)
    assert sample(logits, [work(free, [1, 2], 2)])[0].token == 5


def test_a_bias_counts_before_penalties() -> None:
    """A logit of -1 becomes 1 and is divided; penalties first would have multiplied it."""
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 3] = -1.0
    logits[0, 4] = 0.8
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias={3: 2.0})
    assert sample(logits, [work(sampling)])[0].token == 4
    assert sample(logits, [work(replace(sampling, logit_bias={3: 3.0}))])[0].token == 3


def test_biases_of_one_row_do_not_reach_another() -> None:
    logits = torch.zeros(4, VOCAB)
    plain = work(Sampling(temperature=0.0))
    works = [
        plain,
        work(Sampling(temperature=0.0, logit_bias={9: 1.0, 0: -100.0})),
        plain,
        work(Sampling(temperature=0.0, logit_bias={60: 0.5})),
    ]
    assert [s.token for s in sample(logits, works)] == [0, 9, 0, 60]


def test_a_bad_word_is_completed_nowhere_in_the_output() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    sampling = Sampling(temperature=0.0, bad_word_ids=((4, 5, 7),))
    outputs = {(): 7, (5,): 7, (4, 5): 0, (4, 5, 3): 7, (4, 4, 5): 0, (5, 4): 7}
    for output, token in outputs.items():
        assert sample(logits, [work(sampling, (1, 2, *output), 2)])[0].token == token, output
    prompt = work(sampling, (4, 5), 2)  # as in vLLM, what begins in the prompt is no bad word
    assert sample(logits, [prompt])[0].token == 7
    alone = replace(sampling, bad_word_ids=((7,),))
    assert sample(logits, [work(alone, (1, 2), 2)])[0].token == 0


def test_biased_rows_stay_in_the_vocabulary_if_all_is_forbidden() -> None:
    nothing = Sampling(bad_word_ids=tuple((token,) for token in range(VOCAB)), seed=1)
    for sampling in (nothing, replace(nothing, temperature=0.0, logit_bias={4: 100.0})):
        (sampled,) = sample(torch.randn(1, VOCAB), [work(sampling)])
        assert 0 <= sampled.token < VOCAB


def test_logprobs_are_of_the_raw_logits() -> None:
    logits, _ = cases(6, 1)
    sampling = Sampling(
        temperature=0.1, top_k=1, presence_penalty=2.0, logit_bias={5: 9.0}, logprobs=4
    )
    (sampled,) = sample(logits, [work(sampling)])
    own = logits[0].log_softmax(-1)
    assert sampled.logprob == pytest.approx(own[sampled.token].item(), abs=1e-6)
    assert [one.token for one in sampled.top] == own.topk(4).indices.tolist()
    assert [one.logprob for one in sampled.top] == pytest.approx(own.topk(4).values.tolist())
    (alone,) = sample(logits, [work(replace(sampling, logprobs=0))])
    assert alone.logprob == sampled.logprob
    assert alone.top == ()


def test_row_without_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match="without sampling"):
        sample(torch.zeros(1, 3), [Work([1], 0, 1, [0], 1, None)])


def test_logits_of_more_than_32_bits() -> None:
    """15,000 rows of Qwen's vocabulary. Memory that is never written is never taken."""
    rows, vocab = 15_000, 151_936
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    logits = torch.frombuffer(mmap.mmap(-1, rows * vocab * 4, flags=flags), dtype=torch.float32)
    logits = logits.view(rows, vocab)
    asked = Sampling(
        presence_penalty=0.5,
        repetition_penalty=2.0,
        logit_bias={7: 6.0},
        stop_token_ids=(vocab - 1,),
        min_tokens=9,
    )
    made = adjustments([(rows - 1, work(asked, (1, 7, 3), 2), asked)], vocab)
    adjust(logits, [torch.from_numpy(part) for part in made.words])
    assert logits[-1, [1, 3, 7, vocab - 1]].tolist() == [0.0, -0.5, 3.0, -math.inf]
