"""One vLLM computes, another continues from the store: tokens, accounts, references.

Tokens must be equal although vLLM on a CPU is not bit-exact with itself: logits of other cuts
differ by some 1e-6. So the model has large random weights (``tests.models``), and each test of
greedy tokens checks that the two most likely tokens lie at least ``GAP`` apart at every position.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from kvrelay.block import Namer, Namespace
from kvrelay.block.namespace import LAYOUT
from tests.vllm.conftest import NAMESPACE
from tests.vllm.rig import BLOCK, VOCAB, Output, Request, StoreProcess, VllmProcess, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

GAP = 1e-4
"""Forty times what other cuts change."""

SAME = 1e-4
"""What log probabilities of the same position may differ by after rounding."""

SPACE = Namespace(
    NAMESPACE["model"],
    NAMESPACE["revision"],
    "float32",
    LAYOUT,
    BLOCK,
    numerics=NAMESPACE["numerics"],
)


def computed(engine: VllmProcess, *prompts: Sequence[int], max_tokens: int = 16) -> list[Output]:
    """Greedy outputs without near ties; everything that can be saved is in the store."""
    found = engine.generate(*[Request(one, max_tokens, logprobs=2) for one in prompts])
    engine.settle()
    for output in found:
        for step in output.logprobs:
            best = sorted(step.values(), reverse=True)
            assert best[0] - best[1] > GAP, "choose another seed: the two best tokens nearly tie"
    return found


@pytest.mark.parametrize("length", [31, 32, 33, 64, 200, 777])
def test_another_engine_continues_from_the_store(
    engine: VllmProcess, other: VllmProcess, length: int
) -> None:
    tokens = prompt(length, length)
    (cold,) = computed(engine, tokens)
    assert cold.account["external"] == 0
    assert int(cold.account["saved"]) <= (length + 15) // BLOCK * BLOCK
    (warm,) = other.generate(Request(tokens))
    hit = min(length // BLOCK * BLOCK, length - 1)
    assert warm.tokens == cold.tokens
    assert (warm.account["local"], warm.account["external"]) == (0, hit)
    assert warm.account["computed"] == length - hit
    assert warm.account["executed"] == length - hit + 15
    assert warm.account["failed"] == warm.account["recomputed"] == 0


def test_a_partial_tail_is_handed_over(engine: VllmProcess, other: VllmProcess) -> None:
    """What a prefill leg computed and a decode leg loads: the prompt of any length."""
    for seed, length in ((11, 75), (12, 31), (13, 100)):
        tokens = prompt(seed, length)
        (whole,) = computed(engine, [*tokens[:-1], tokens[-1] ^ 1])
        (whole,) = computed(engine, tokens)
        engine.forget()
        (first,) = engine.generate(Request(tokens, 1, save_tail=True))
        engine.settle()
        (rest,) = other.generate(Request([*tokens, *first.tokens], 15))
        assert first.tokens + rest.tokens == whole.tokens
        assert rest.account["external"] == length
        assert rest.account["computed"] == 1


def test_local_store_and_new_tokens_in_one_prompt(engine: VllmProcess, other: VllmProcess) -> None:
    tokens = prompt(21, 300)
    (cold,) = computed(engine, tokens)
    computed(other, tokens[:80], max_tokens=1)
    other.settle()
    (warm,) = other.generate(Request(tokens))
    assert warm.tokens == cold.tokens
    assert (warm.account["local"], warm.account["external"]) == (64, 224)


def test_a_batch_of_hits_and_misses(engine: VllmProcess, other: VllmProcess) -> None:
    shared = prompt(31, 96)
    prompts = [shared + prompt(40 + number, 10 + 17 * number) for number in range(8)]
    cold = computed(engine, *prompts[:5])
    mixed = other.generate(*[Request(one) for one in prompts])
    other.settle()
    assert [one.tokens for one in mixed[:5]] == [one.tokens for one in cold]
    assert [one.tokens for one in mixed[5:]] == [
        one.tokens for one in computed(engine, *prompts[5:])
    ]
    hits = [int(one.account["external"]) + int(one.account["local"]) for one in mixed]
    assert hits[:5] == [len(one) // BLOCK * BLOCK for one in prompts[:5]]


@pytest.mark.parametrize(("block", "left"), [(0, 0), (3, 3 * BLOCK)])
def test_a_flipped_bit_is_a_miss(
    engine: VllmProcess, other: VllmProcess, store: StoreProcess, block: int, left: int
) -> None:
    """vLLM's own count of cached tokens is what was promised; the account is what was loaded."""
    tokens = prompt(50 + block, 200)
    (cold,) = computed(engine, tokens)
    store.flip(Namer(SPACE).chain(tokens, BLOCK), block)
    (warm,) = other.generate(Request(tokens))
    assert warm.tokens == cold.tokens
    assert warm.account["missed"] == "failed_verification" or not left
    assert (warm.account["external"], warm.account["computed"]) == (left, 200 - left)
    assert warm.account["failed"] == 192 - left
    assert warm.account["executed"] == 200 - left + 15
    state = other.settle()
    assert state["rank"]["corrupt"] >= 1  # type: ignore[index]
    computed(other, tokens)
    engine.forget()
    (again,) = engine.generate(Request(tokens))
    assert again.tokens == cold.tokens
    assert again.account["external"] == 192, "the wrong block was replaced by a right one"


def test_a_salt_separates(engine: VllmProcess, other: VllmProcess) -> None:
    tokens = prompt(61, 100)
    engine.generate(Request(tokens, salt="5a" * 32))
    engine.settle()
    for salt, hit in ((None, 0), ("5b" * 32, 0), ("5a" * 32, 96)):
        (found,) = other.generate(Request(tokens, salt=salt))
        assert found.account["external"] == hit


def test_requests_that_skip(engine: VllmProcess, other: VllmProcess) -> None:
    tokens = prompt(62, 100)
    (skipped,) = engine.generate(Request(tokens, skip=True))
    state = engine.settle()
    (cold,) = other.generate(Request(tokens))
    assert (skipped.account["saved"], cold.account["external"]) == (0, 0)
    other.settle()
    engine.forget()
    (reads_not,) = engine.generate(Request(tokens, skip_reading=True))
    assert reads_not.account["external"] == reads_not.account["local"] == 0
    assert reads_not.tokens == skipped.tokens == cold.tokens
    assert state["findings"] == []


def test_log_probabilities_of_loaded_prompts(engine: VllmProcess, other: VllmProcess) -> None:
    tokens = prompt(63, 150)
    (cold,) = computed(engine, tokens)
    (warm,) = other.generate(Request(tokens, logprobs=2))
    assert warm.account["external"] == 128
    for one, two in zip(cold.logprobs, warm.logprobs, strict=True):
        assert one.keys() == two.keys()
        assert all(math.isclose(one[token], two[token], abs_tol=SAME) for token in one)


RULES: list[dict[str, object]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 2**63 + 5, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "seed": 1, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "bad_word_ids": [[5], [6, 7]], "logit_bias": {"9": 2.5}},
    {"temperature": 1.0, "seed": 9, "min_tokens": 30, "stop_token_ids": [11, 12]},
]


def test_sampled_streams_continue_at_random_cuts(engine: VllmProcess, other: VllmProcess) -> None:
    """30 streams on another engine, beside strangers, after any number of tokens: the same."""
    numbers = random.Random(5)
    total = 40
    prompts = [prompt(100 + number, 20 + 9 * number) for number in range(30)]
    rules = [{**RULES[number % 6], "seed": 1000 + number} for number in range(30)]
    whole: list[list[int]] = []
    for first in range(0, 30, 8):
        requests = [
            Request(tokens, total, sampling=rule)
            for tokens, rule in zip(prompts[first : first + 8], rules[first : first + 8])  # noqa: B905 - slices
        ]
        whole += [one.tokens for one in engine.generate(*requests)]
    engine.settle()
    assert len({tuple(one) for one in whole}) == 30
    hits = 0
    for first in range(0, 30, 5):
        requests, wanted = [], []
        for number in range(first, first + 5):
            cut = numbers.randrange(1, total)
            tokens = prompts[number] + whole[number][:cut]
            length = len(prompts[number])
            requests.append(Request(tokens, total - cut, sampling=rules[number], prompt_len=length))
            requests.append(Request(prompt(900 + number, 50), 10))
            wanted.append(whole[number][cut:])
        continued = other.generate(*requests)[::2]
        assert [one.tokens for one in continued] == wanted
        hits += sum(int(one.account["external"]) for one in continued)
    other.settle()
    assert hits > 30 * BLOCK


def test_a_seed_decides_whatever_runs_beside(engine: VllmProcess) -> None:
    rule = {"temperature": 1.0, "seed": 77}
    request = Request(prompt(71, 40), 30, sampling=rule)
    (alone,) = engine.generate(request)
    strangers = [Request(prompt(72 + n, 30 + n), 20, sampling=RULES[n]) for n in range(6)]
    assert engine.generate(*strangers[:3], request, *strangers[3:])[3].tokens == alone.tokens
    assert max(alone.tokens) < VOCAB


def test_preempted_requests_come_back_with_the_same_tokens(
    engine: VllmProcess, other: VllmProcess
) -> None:
    """Eight requests of nine blocks each on 47 blocks; each step audits vLLM's pool."""
    prompts = [prompt(200 + number, 190) for number in range(8)]
    wanted = computed(engine, *prompts, max_tokens=90)
    found = other.generate(*[Request(one, 90) for one in prompts])
    other.settle()
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    preempted = [one for one in found if one.account["preemptions"]]
    assert preempted, "the pool was too large"
    for one in found:
        account = {name: value for name, value in one.account.items() if isinstance(value, int)}
        assert account["local"] + account["external"] + account["computed"] == 190
        executed = account["computed"] + 89 + account["recomputed"]
        assert account["executed"] == executed


def test_cancelled_requests_leave_nothing_behind(engine: VllmProcess, other: VllmProcess) -> None:
    """Aborted while they wait, load, compute and decode."""
    prompts = [prompt(300 + number, 150 + 20 * number) for number in range(6)]
    wanted = computed(engine, *prompts)
    for seed in range(5):
        numbers = random.Random(seed)
        aborted = {number: numbers.randrange(1, 14) for number in range(5)}
        *_, last = other.generate(*[Request(one) for one in prompts], abort=aborted)
        other.forget()
        assert last.tokens == wanted[-1].tokens


def test_the_metrics_page_has_the_sums_of_the_accounts(engine: VllmProcess) -> None:
    names = ("local", "external", "computed")
    before = engine.call("metrics")
    found = engine.generate(*[Request(prompt(400 + number, 70)) for number in range(4)])
    engine.settle()
    after = engine.call("metrics")
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    for name in names:
        counted = f"kvrelay:prompt_tokens_{name}_total"
        assert after[counted] - before[counted] == sum(int(one.account[name]) for one in found)
    blocks = "kvrelay:store_saved_blocks_total"
    assert after[blocks] - before[blocks] == 4 * 2
