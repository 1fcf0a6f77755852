"""The sampler for model runner V2: the tokens of the native sampler, and nothing read back."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine.core.updates import Work
from kvrelay.engine.sampling.sampler import sample
from kvrelay.engine.vllm.device_rows import DeviceRows, v2_reasons
from kvrelay.engine.vllm.rules import Rules
from kvrelay.sampling import Sampling
from kvrelay.structured import StructuredOutput

VOCAB = 600
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "unique_consecutive"}


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for a device."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert func.overloadpacket.__name__ not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def random_sampling(numbers: random.Random) -> Sampling:
    return Sampling(
        temperature=numbers.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=numbers.choice([0, 1, 7, 300]),
        top_p=numbers.choice([1.0, 0.9, 0.4]),
        min_p=numbers.choice([0.0, 0.05]),
        seed=numbers.choice([None, 3, 2**64 - 1, 2**40 + 7]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_same_tokens_as_the_native_sampler(seed: int) -> None:
    """Slots are reused, rows come in any order, strangers stay as they are."""
    numbers = random.Random(seed)
    rows = DeviceRows(16, VOCAB, torch.device("cpu"))
    held: dict[int, Sampling | None] = {}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        for slot in numbers.sample(range(16), 5):
            held[slot] = random_sampling(numbers) if numbers.random() < 0.8 else None
            sampling = held[slot]
            rows.set(slot, None if sampling is None else Rules(sampling, 1))
        slots = numbers.sample(sorted(held), min(len(held), 9))
        last = [numbers.randrange(2000) for _ in slots]
        logits = torch.randn((len(slots), VOCAB), generator=generator) * 4
        with NoReads():  # type: ignore[no-untyped-call]
            found = rows.choose(logits.clone(), torch.tensor(slots), torch.tensor(last), slots)
        for row, slot in enumerate(slots):
            sampling = held[slot]
            if sampling is None:
                assert torch.equal(found[row], logits[row])
                continue
            work = Work([0] * (last[row] + 1), last[row], 1, (), 1, sampling)
            (wanted,) = sample(logits[row : row + 1], [work])
            possible = (found[row] > -torch.inf).nonzero()[:, 0].tolist()
            assert possible == [wanted.token]
            assert found[row, wanted.token] == 0


def test_without_rows_of_ours_the_logits_stay() -> None:
    rows = DeviceRows(4, VOCAB, torch.device("cpu"))
    rows.set(2, None)
    logits = torch.randn(1, VOCAB)
    assert rows.choose(logits, torch.tensor([2]), torch.tensor([5]), [2]) is logits


def test_what_needs_the_tokens_so_far_is_named() -> None:
    assert v2_reasons(Sampling(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, seed=9)) == []
    needs = Sampling(
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={1: 2.0},
        bad_word_ids=((1,),),
        min_tokens=2,
        structured_output=StructuredOutput(json_object=True),
    )
    assert len(v2_reasons(needs)) == 7
