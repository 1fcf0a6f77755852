"""Several samples of one prompt: each as a single request's, the prompt computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from kvrelay.errors import Exhausted, Rejected
from kvrelay.v1 import router_pb2
from router.queue.quotas import QuotaHold
from tests.router.fakes import (
    LENGTH,
    Behaviour,
    Running,
    answer,
    decode_worker,
    ids,
    prefill_worker,
    running,
    text,
    text_of,
)
from tests.router.rig import PROMPT, failing, request, until

Responses = Sequence[router_pb2.GenerateResponse]
LONG = 300  # tokens: a worker that was not cancelled would be far from done


def several(n: int, max_tokens: int = 8, **sampling: object) -> router_pb2.GenerateRequest:
    asked = request(max_tokens, **sampling)
    asked.n = n
    return asked


def of(responses: Responses, index: int) -> list[router_pb2.GenerateResponse]:
    return [response for response in responses if response.index == index]


def check_whole(responses: Responses, n: int, count: int, seed: int = 5) -> None:
    """Every sample is that of a single request with its seed."""
    for index in range(n):
        sample, own = of(responses, index), (seed + index) % (1 << 64)
        assert ids(sample) == answer(PROMPT, count, own)
        assert text(sample) == text_of(answer(PROMPT, count, own))
        assert sample[0].seed == own
        assert {one.request_id for one in sample} == {responses[0].request_id, ""}
        assert sample[0].prompt_hash == responses[0].prompt_hash
        assert sample[-1].finish_reason == LENGTH
        assert not any(one.finish_reason for one in sample[:-1])
    assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]


@pytest.mark.parametrize("count", [1, 2, 8])
async def test_the_prompt_is_computed_once(count: int) -> None:
    prefill, decode = prefill_worker(), decode_worker()
    async with running([prefill, decode]) as router:
        single = (await router.generate(request(count)))[-1].usage
        responses = await router.generate(several(5, count))
        check_whole(responses, 5, count)
        assert router.service.totals.first_tokens == 2
        assert router.service.totals.generation_tokens == 6 * count
        assert router.service.totals.prompt_tokens == 2 * len(PROMPT)
    assert len(prefill.legs) == 2
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 5 * count)
    assert usage.cached_prompt_tokens == single.cached_prompt_tokens
    assert usage.recomputed == 0
    legs = [[leg for leg in usage.legs if leg.sample == index] for index in range(5)]
    assert [leg.address for leg in legs[0]] == [leg.address for leg in single.legs]
    for own in legs[1:]:
        assert [leg.address for leg in own] == [decode.address]
        assert [leg.generated for leg in own] == [count]
    assert sum(map(len, legs)) == len(usage.legs)


async def test_the_others_wait_for_the_handoff() -> None:
    gate = asyncio.Event()
    prefill = prefill_worker(behaviour=Behaviour(handoff_gate=gate))
    decode = decode_worker()
    async with running([prefill, decode]) as router:
        call = aiter(router.call(several(3)))
        first = await asyncio.wait_for(anext(call), 5)
        assert (first.index, ids([first])) == (0, answer(PROMPT, 1, 5))
        assert not decode.legs
        gate.set()
        check_whole([first, *[response async for response in call]], 3, 8)


async def test_the_others_go_where_the_prompt_was_computed() -> None:
    """Without prefill workers its blocks are on the worker of the first sample."""
    workers = [decode_worker(f"d{number}") for number in range(4)]
    async with running(workers) as router:
        check_whole(await router.generate(several(6)), 6, 8)
    assert sorted(len(worker.legs) for worker in workers) == [0, 0, 0, 6]


async def test_seeds_wrap_and_are_drawn() -> None:
    last = (1 << 64) - 1
    async with running([decode_worker()]) as router:
        check_whole(await router.generate(several(3, seed=last)), 3, 8, last)
        drawn = several(2)
        drawn.sampling.ClearField("seed")
        responses = await router.generate(drawn)
        check_whole(responses, 2, 8, of(responses, 0)[0].seed)


async def test_one_sample_is_as_no_number() -> None:
    async with running([prefill_worker(), decode_worker()]) as router:
        plain, one = await router.generate(request()), await router.generate(several(1))
    assert ids(one) == ids(plain)
    assert [leg.generated for leg in one[-1].usage.legs] == [1, 7]


async def test_each_sample_ends_by_itself() -> None:
    """A stop token of one sample, another stop string of another."""
    tokens = [answer(PROMPT, 8, 5 + index) for index in range(3)]
    stop = tokens[1][3]
    assert stop not in tokens[0] + tokens[2]
    async with running([prefill_worker(), decode_worker()]) as router:
        responses = await router.generate(several(3, stop_token_ids=[stop]))
    assert ids(of(responses, 1)) == tokens[1][:4]
    assert [ids(of(responses, index)) for index in (0, 2)] == [tokens[0], tokens[2]]
    assert responses[-1].usage.completion_tokens == 8 + 4 + 8


@pytest.mark.parametrize("leaves", ["at the first token", "in the middle"])
async def test_a_client_that_leaves_ends_all(leaves: str) -> None:
    gate = asyncio.Event()
    prefill = prefill_worker(behaviour=Behaviour(handoff_gate=gate))
    step = asyncio.Semaphore(0)
    decode = decode_worker(behaviour=Behaviour(step=step))
    async with running([prefill, decode]) as router:
        call = router.call(several(4, LONG))
        stream = aiter(call)
        await asyncio.wait_for(anext(stream), 5)
        if leaves == "in the middle":
            gate.set()
            await until(lambda: len(decode.legs) == 4)
            seen = {0}
            while len(seen) < 4:
                step.release()  # one token, of the leg that has waited longest
                seen.add((await asyncio.wait_for(anext(stream), 5)).index)
        call.cancel()
        await until_running(router, 0, 0)
        await until(lambda: not any(worker.legs for worker in router.registry.workers))
        assert len(decode.legs) == (4 if leaves == "in the middle" else 0)


async def test_a_worker_that_dies_moves_its_samples() -> None:
    dying = decode_worker("d0", behaviour=Behaviour(die_after=3))
    async with running([prefill_worker(), dying, decode_worker("d1")]) as router:
        responses = await router.generate(several(6, 12))
    check_whole(responses, 6, 12)
    usage = responses[-1].usage
    assert any(leg.lost for leg in usage.legs)
    assert sum(leg.generated for leg in usage.legs) == usage.completion_tokens == 72


async def test_a_failure_of_one_ends_all() -> None:
    decode = decode_worker(behaviour=Behaviour(fail=Rejected("max_tokens", "no"), fail_after=2))
    async with running([prefill_worker(), decode]) as router:
        error = await failing(router.generate(several(4)))
        assert isinstance(error, Rejected)
        assert router.service.gate.status(0).running == 0
        assert router.service.ended["invalid_argument"] == 1


# --- resuming --------------------------------------------------------------------------------


def resumed(asked: router_pb2.GenerateRequest, received: Responses) -> router_pb2.GenerateRequest:
    """The request that a client sends after these responses."""
    again = router_pb2.GenerateRequest()
    again.CopyFrom(asked)
    for index in range(asked.n):
        own = of(received, index)
        ended = any(one.finish_reason for one in own)
        again.samples.add(token_ids=ids(own), ended=ended)
    again.weights = received[0].weights
    again.prompt_hash = received[0].prompt_hash
    return again


async def test_resumed_after_every_response() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    async with running([prefill, decode]) as router:
        asked = several(3, 4)
        whole = await router.generate(asked)
        for cut in range(1, len(whole)):
            rest = await router.generate(resumed(asked, whole[:cut]))
            both = [*whole[:cut], *rest]
            for index in range(3):
                assert ids(of(both, index)) == answer(PROMPT, 4, 5 + index)
                assert sum(bool(one.finish_reason) for one in of(both, index)) == 1
            usage = rest[-1].usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 12)
            assert sum(leg.generated for leg in usage.legs) == len(ids(rest))
    assert not decode.legs[-1].output_token_ids or len(prefill.legs) < len(whole)


async def test_a_sample_whose_end_was_not_received_ends_at_once() -> None:
    async with running([prefill_worker(), decode_worker()]) as router:
        again = several(2, 4)
        again.samples.add(token_ids=answer(PROMPT, 4, 5))
        again.samples.add(token_ids=answer(PROMPT, 1, 6))
        responses = await router.generate(again)
    assert [(r.index, r.finish_reason) for r in of(responses, 0)] == [(0, LENGTH)]
    assert ids(of(responses, 1)) == answer(PROMPT, 4, 6)[1:]


def sample(tokens: Sequence[int], ended: bool = False) -> router_pb2.SampleOutput:
    return router_pb2.SampleOutput(token_ids=tokens, ended=ended)


@pytest.mark.parametrize(
    ("n", "samples", "name", "told"),
    [
        (2, [sample([5])], "samples", "must be one for each of n > 1, got 1 for n 2"),
        (1, [sample([5])], "samples", "must be one for each of n > 1, got 1 for n 1"),
        (2, [sample([5]), sample([380])], "samples[1].token_ids[0]", "outside the vocabulary"),
        (2, [sample([5] * 9), sample([])], "samples[0].token_ids", "9 tokens so far, but max"),
        (2, [sample([5] * 1001), sample([])], "samples[0].token_ids", "tokens so far, but max"),
        (2, [sample([5], True), sample([6], True)], "samples", "nothing to resume"),
        (2, [sample([7, 8]), sample([])], "samples[0].token_ids[1]", "had ended before"),
    ],
)
async def test_what_cannot_be_resumed(
    n: int, samples: list[router_pb2.SampleOutput], name: str, told: str
) -> None:
    async with running([decode_worker()]) as router:
        asked = several(n, 8, stop_token_ids=[7])
        asked.samples.extend(samples)
        error = await failing(router.generate(asked))
        assert isinstance(error, Rejected)
        assert error.field == name
        assert told in error.message
        asked = several(2)
        asked.output_token_ids.append(5)
        error = await failing(router.generate(asked))
        assert isinstance(error, Rejected)
        assert error.field == "output_token_ids"
        asked = several(2)
        asked.sampling.ClearField("seed")
        asked.samples.extend([sample([5]), sample([])])
        error = await failing(router.generate(asked))
        assert isinstance(error, Rejected)
        assert error.field == "sampling.seed"


# --- places ----------------------------------------------------------------------------------


async def until_running(router: Running, count: int, waiting: int) -> None:
    def reached() -> bool:
        status = router.service.gate.status(0)
        return (status.running, status.waiting) == (count, waiting)

    await until(reached)


async def test_every_sample_has_a_place() -> None:
    """Two slots: two samples run, four wait, and all get their turn."""
    worker = decode_worker(max_num_seqs=1, behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker]) as router:
        call = asyncio.ensure_future(router.generate(several(6, 3)))
        await until_running(router, 2, 4)
        assert worker.behaviour.step is not None
        for _ in range(18):
            worker.behaviour.step.release()
        check_whole(await call, 6, 3)
        await until_running(router, 0, 0)


async def test_the_others_wait_for_their_slot_as_long_as_the_request_may_take() -> None:
    """A request that has not begun would be refused after twice ``queue_seconds``."""
    worker = decode_worker(max_num_seqs=1, behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker], queue_seconds=0.1) as router:
        call = asyncio.ensure_future(router.generate(several(4, 3)))
        await until_running(router, 2, 2)
        error = await failing(router.generate(request()))
        assert isinstance(error, Exhausted)
        assert worker.behaviour.step is not None
        for _ in range(12):
            worker.behaviour.step.release()
        check_whole(await call, 4, 3)


async def test_the_prompt_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr(QuotaHold, "charge", lambda hold, tokens: charged.append(tokens))
    async with running([decode_worker()]) as router:
        await router.generate(several(4, 8))
        again = several(3, 8)
        again.samples.extend([sample([]), sample(answer(PROMPT, 8, 6), True), sample([9])])
        await router.generate(again)
    assert charged == [0, len(PROMPT) + 4 * 8, 0, len(PROMPT) + 2 * 8]  # tokens so far as well


async def test_more_samples_than_requests_are_allowed() -> None:
    async with running([decode_worker()], max_requests=8) as router:
        error = await failing(router.generate(several(9)))
        assert isinstance(error, Rejected)
        assert error.field == "n"
        assert "--max-requests 8" in error.message
        check_whole(await router.generate(several(8)), 8, 8)


async def test_a_full_router_refuses_samples_before_any_work() -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker], max_requests=8) as router:
        call = asyncio.ensure_future(router.generate(several(6, 3)))
        await until_running(router, 6, 0)
        error = await failing(router.generate(several(4)))
        assert isinstance(error, Exhausted)
        assert len(worker.legs) == 1
        assert worker.behaviour.step is not None
        for _ in range(18):
            worker.behaviour.step.release()
        check_whole(await call, 6, 3)


async def test_a_fleet_that_is_full_for_a_moment_is_asked_again() -> None:
    """The client has tokens of another sample: the request waits and goes on."""
    decode = decode_worker(behaviour=Behaviour(fail=Exhausted("full", 0.05)))
    async with running([prefill_worker(), decode]) as router:
        call = asyncio.ensure_future(router.generate(several(3)))
        await until(lambda: len(decode.legs) >= 3)
        decode.behaviour.fail = None
        check_whole(await call, 3, 8)


async def test_n_through_both_bounds() -> None:
    async with running([decode_worker()]) as router:
        for n in (0, -1, 129, 1 << 30):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.generate(several(n))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"must be 1 to 128, got {n}" in (caught.value.details() or "")
        check_whole(await router.generate(several(128, 2)), 128, 2)
