"""The path of a request through the router: legs, failures, cancellation, resumes, stop strings."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrelay.errors import (
    DeadlineExceeded,
    Exhausted,
    KvrelayError,
    Mismatch,
    Rejected,
    Unavailable,
)
from kvrelay.v1 import router_pb2
from tests.router.fakes import (
    LENGTH,
    STOP,
    Behaviour,
    answer,
    decode_worker,
    ids,
    prefill_worker,
    running,
    text,
    text_of,
    tokenizer,
)
from tests.router.rig import PROMPT, failing, request, until

LONG = 380  # tokens: a worker that was not cancelled would be far from done


async def test_two_legs_one_stream() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    async with running([prefill, decode]) as router:
        responses = await router.generate(request())
    assert ids(responses) == answer(PROMPT, 8, 5)
    assert text(responses) == text_of(answer(PROMPT, 8, 5))
    assert [list(r.tokens) == [] for r in responses[:-1]] == [False] * (len(responses) - 1)
    assert responses[0].seed == 5
    assert responses[0].request_id
    assert not any(r.HasField("usage") or r.finish_reason for r in responses[:-1])
    assert responses[-1].finish_reason == LENGTH
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (11, 8, 4)
    assert [leg.address for leg in usage.legs] == [prefill.address, decode.address]
    assert [leg.generated for leg in usage.legs] == [1, 7]
    assert usage.transfer_seconds == 0.25
    assert 0.125 < usage.queue_seconds < 5  # the worker's, and the router's
    assert usage.prefill_seconds == 0.5
    assert 0 < usage.first_token_seconds < 5
    assert decode.handoffs == [(11, b"n" * 32)]
    assert prefill.legs[0].namespace_digest == b"d" * 32
    assert all(left is not None and 0 < left < 22 for left in prefill.time_left)
    assert all(left is not None and 0 < left < 22 for left in decode.time_left)


async def test_text_and_chat_are_tokenised_as_the_model_does() -> None:
    decode = decode_worker()
    async with running([decode]) as router:
        await router.generate(router_pb2.GenerateRequest(prompt="The quick fox", max_tokens=1))
        long = "The dog sleeps. " * 1000
        await failing(router.generate(router_pb2.GenerateRequest(prompt=long)))
        chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content="Hi")])
        await router.generate(router_pb2.GenerateRequest(chat=chat, max_tokens=1))
    assert list(decode.legs[0].prompt_token_ids) == tokenizer().encode("The quick fox")
    turns = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer().render(turns)
    assert list(decode.legs[1].prompt_token_ids) == tokenizer().encode(rendered, False)


async def test_defaults_are_resolved_once() -> None:
    decode = decode_worker()
    async with running([decode]) as router:
        plain = router_pb2.GenerateRequest(prompt="fox")
        first, second = await router.generate(plain), await router.generate(plain)
    assert len(ids(first)) == 16
    seeds = [responses[0].seed for responses in (first, second)]
    assert [leg.sampling.seed for leg in decode.legs] == seeds
    assert seeds[0] != seeds[1]


async def test_the_first_token_does_not_wait_for_the_handoff() -> None:
    gate = asyncio.Event()
    prefill = prefill_worker(behaviour=Behaviour(handoff_gate=gate))
    decode = decode_worker()
    async with running([prefill, decode]) as router:
        call = aiter(router.call(request()))
        first = await asyncio.wait_for(anext(call), 5)
        assert ids([first]) == answer(PROMPT, 1, 5)
        assert not decode.legs
        gate.set()
        rest = [response async for response in call]
    assert ids([first, *rest]) == answer(PROMPT, 8, 5)


async def test_no_decode_leg_when_the_first_token_ends_it() -> None:
    prefill, decode = prefill_worker(), decode_worker()
    async with running([prefill, decode]) as router:
        responses = await router.generate(request(1))
    assert ids(responses) == answer(PROMPT, 1, 5)
    assert responses[-1].finish_reason == LENGTH
    assert len(responses[-1].usage.legs) == 1
    assert not decode.legs


@pytest.mark.parametrize("count", [1, 8])
async def test_a_stop_token_that_is_the_last_one_allowed_is_a_stop(count: int) -> None:
    tokens = answer(PROMPT, count, 5)
    assert tokens[-1] not in tokens[:-1]
    async with running([prefill_worker(), decode_worker()]) as router:
        responses = await router.generate(request(count, stop_token_ids=tokens[-1:]))
    assert ids(responses) == tokens
    assert responses[-1].finish_reason == STOP


async def test_without_prefill_worker_the_decode_worker_does_it_all() -> None:
    decode = decode_worker()
    async with running([decode]) as router:
        responses = await router.generate(request())
    assert ids(responses) == answer(PROMPT, 8, 5)
    assert decode.handoffs == [(0, b"")]
    assert not decode.legs[0].output_token_ids


@pytest.mark.parametrize("error", [Unavailable("leaving"), Exhausted("full", 0.05)])
async def test_a_prefill_worker_that_fails_is_replaced(error: KvrelayError) -> None:
    bad = [prefill_worker(f"p{i}", behaviour=Behaviour(fail=error)) for i in range(2)]
    good, decode = prefill_worker("p2"), decode_worker()
    async with running([*bad, good, decode]) as router:
        for _ in range(3):
            assert ids(await router.generate(request())) == answer(PROMPT, 8, 5)
    assert len(good.legs) == 3


async def test_all_prefill_workers_fail() -> None:
    prefill = prefill_worker(behaviour=Behaviour(die_after=0))
    decode = decode_worker()
    async with running([prefill, decode]) as router:
        responses = await router.generate(request())
    assert ids(responses) == answer(PROMPT, 8, 5)
    assert decode.handoffs == [(0, b"")]


async def test_prefill_dies_after_its_first_token() -> None:
    prefill = prefill_worker(behaviour=Behaviour(no_handoff=True))
    decode = decode_worker()
    async with running([prefill, decode]) as router:
        responses = await router.generate(request())
    assert ids(responses) == answer(PROMPT, 8, 5)
    assert decode.handoffs == [(0, b"")]
    assert [leg.generated for leg in responses[-1].usage.legs] == [1, 7]


@pytest.mark.parametrize("after", [0, 1, 3, 6])
async def test_a_decode_worker_dies_in_the_stream(after: int) -> None:
    dying = [decode_worker(f"d{i}", behaviour=Behaviour(die_after=after)) for i in range(2)]
    workers = [prefill_worker(), *dying, decode_worker("d2")]
    async with running(workers, max_deaths=3) as router:
        responses = await router.generate(request(24))
    assert ids(responses) == answer(PROMPT, 24, 5)
    assert text(responses) == text_of(answer(PROMPT, 24, 5))
    legs = responses[-1].usage.legs
    assert sum(leg.generated for leg in legs) == 24
    assert legs[-1].worker_id == "d2"


async def test_a_worker_that_sends_garbage_is_replaced() -> None:
    bad = decode_worker(behaviour=Behaviour(garbage_after=2))
    async with running([bad, decode_worker("d1")]) as router:
        results = await asyncio.gather(*(router.generate(request(seed=s)) for s in range(4)))
    for seed, responses in enumerate(results):
        assert ids(responses) == answer(PROMPT, 8, seed)
    assert bad.legs


async def test_a_lone_decode_worker_that_comes_back_goes_on() -> None:
    decode = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(3)))
    async with running([decode], worker_wait=10.0) as router:
        call = aiter(router.call(request()))
        responses = [await anext(call) for _ in range(3)]
        await decode.stop()
        reborn = decode_worker("d0-again")
        await reborn.start(decode.address)
        responses += [response async for response in call]
        await reborn.stop()
    assert ids(responses) == answer(PROMPT, 8, 5)


async def test_failures_are_bounded() -> None:
    bad = [decode_worker(f"d{i}", behaviour=Behaviour(fail=Unavailable("x"))) for i in range(4)]
    async with running(bad, max_failures=2) as router:
        error = await failing(router.generate(request()))
        assert isinstance(error, Unavailable)
        assert sum(len(worker.legs) for worker in bad) == 3
        for worker in bad:
            worker.behaviour.fail = None
        assert ids(await router.generate(request())) == answer(PROMPT, 8, 5)


@pytest.mark.parametrize(
    "error",
    [
        Rejected("leg.sampling", "cannot"),
        Mismatch("handoff.last_block_name", "other"),
        KvrelayError("bug"),
    ],
)
async def test_other_errors_are_passed_on(error: KvrelayError) -> None:
    decode = decode_worker(behaviour=Behaviour(fail=error))
    async with running([decode, decode_worker("d1", behaviour=Behaviour(fail=error))]) as router:
        back = await failing(router.generate(request()))
    assert type(back) is type(error)
    assert getattr(back, "field", None) == getattr(error, "field", None)


async def test_a_full_fleet_says_when_to_retry() -> None:
    decode = decode_worker(behaviour=Behaviour(fail=Exhausted("the queue is full", 2.5)))
    async with running([decode]) as router:
        error = await failing(router.generate(request()))
    assert isinstance(error, Exhausted)
    assert error.retry_after == 2.5


async def test_full_prefill_workers_are_not_evaded() -> None:
    full = Behaviour(fail=Exhausted("the queue is full", 2.5))
    decode = decode_worker()
    async with running([prefill_worker(behaviour=full), decode]) as router:
        error = await failing(router.generate(request()))
    assert isinstance(error, Exhausted)
    assert not decode.legs


async def test_a_full_decode_worker_after_the_first_token_is_waited_for() -> None:
    decode = decode_worker(behaviour=Behaviour(fail=Exhausted("full", 0.05)))
    async with running([prefill_worker(), decode], max_failures=1000) as router:
        call = aiter(router.call(request()))
        first = await anext(call)
        await decode.entered.wait()
        decode.behaviour.fail = None
        assert ids([first, *[r async for r in call]]) == answer(PROMPT, 8, 5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_cancellation_reaches_the_worker(role: str) -> None:
    step = asyncio.Semaphore(0 if role == "prefill" else 3)
    prefill = prefill_worker(behaviour=Behaviour(step=step if role == "prefill" else None))
    decode = decode_worker(behaviour=Behaviour(step=step))
    worker = prefill if role == "prefill" else decode
    async with running([prefill, decode]) as router:
        call = router.call(request(100), 60)
        await asyncio.wait_for(worker.entered.wait(), 20)
        call.cancel()
        await asyncio.wait_for(worker.cancelled.wait(), 20)
        await asyncio.wait_for(router.service.gate.drain(), 20)
        assert all(worker.candidate().legs == 0 for worker in router.registry.workers)


async def test_a_storm_of_clients_that_leave_holds_nothing() -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    workers = [prefill_worker(), prefill_worker("p1"), decode_worker(), decode_worker("d1")]
    async with running(workers) as router:

        async def one() -> None:
            call = router.call(request(chance.choice([1, 50, 900])), 120)
            for _ in range(chance.choice([0, 0, 1, 2, 20])):
                await asyncio.wait((asyncio.ensure_future(call.read()),), timeout=20)
            call.cancel()

        for _ in range(6):
            await asyncio.gather(*(one() for _ in range(50)))
        await asyncio.wait_for(router.service.gate.drain(), 20)
        assert all(worker.candidate().legs == 0 for worker in router.registry.workers)
        assert all(worker.candidate().tokens == 0 for worker in router.registry.workers)


async def test_deadline_ends_both_sides() -> None:
    decode = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(2)))
    async with running([decode]) as router:
        for seconds in (0.5, 2.0, 8.0):  # a stalled machine brings the leg after the deadline
            error = await failing(router.generate(request(), seconds))
            assert isinstance(error, DeadlineExceeded)
            if decode.legs:
                break
        await asyncio.wait_for(decode.cancelled.wait(), 20)


async def test_the_router_bounds_time() -> None:
    decode = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(2)))
    async with running([decode], max_timeout=0.3) as router:
        error = await failing(router.generate(request()))
        assert isinstance(error, DeadlineExceeded)
        assert "--max-timeout" in str(error)
        assert "the router's --default-timeout" in str(error)  # an HTTP request has no other limit


async def test_resume_at_every_token() -> None:
    whole = answer(PROMPT, 8, 5)
    async with running([prefill_worker(), decode_worker()]) as router:
        for count in range(9):
            continued = request()
            continued.output_token_ids.extend(whole[:count])
            responses = await router.generate(continued)
            assert ids(responses) == whole[count:]
            assert text_of(whole).endswith(text(responses))
            assert responses[-1].finish_reason == LENGTH
            assert responses[-1].usage.completion_tokens == 8
            assert responses[0].seed == 5


def stop_in(whole: list[int], at: int) -> tuple[str, str]:
    """A stop string that lies across token ``at``, and the text before it."""
    texts = [text_of(whole[:count]) for count in range(len(whole) + 1)]
    stop = texts[at + 1][len(texts[at - 1]) :]
    assert "\ufffd" not in stop
    return stop, texts[-1][: texts[-1].index(stop)]


@pytest.mark.parametrize("ignore", [False, True])
async def test_stop_strings_across_tokens_legs_and_resumes(ignore: bool) -> None:
    seed = next(
        seed
        for seed in range(10_000)
        if text_of(answer(PROMPT, 6, seed)).isascii() and len(text_of(answer(PROMPT, 6, seed))) > 12
    )
    whole = answer(PROMPT, 6, seed)
    stop, before = stop_in(whole, 1)
    decode = decode_worker(behaviour=Behaviour(ignore_stops=ignore))
    async with running([prefill_worker(), decode]) as router:
        decode.behaviour.step = asyncio.Semaphore(len(whole))  # it cannot be whole before the stop
        responses = await router.generate(request(LONG, stop=[stop], seed=seed))
        used = ids(responses)
        assert text(responses) == before
        assert used == whole[: len(used)]
        assert responses[-1].finish_reason == STOP
        assert stop in text_of(used)
        assert stop not in text_of(used[:-1])
        for count in range(1, len(used) + 1):
            told = text(responses[:count])
            continued = request(LONG, stop=[stop], seed=seed)
            continued.output_token_ids.extend(used[:count])
            decode.behaviour.step = asyncio.Semaphore(len(whole))
            rest = await router.generate(continued)
            assert ids(rest) == used[count:]
            assert told + text(rest) == before
            assert rest[-1].finish_reason == STOP
        if ignore:
            await asyncio.wait_for(decode.cancelled.wait(), 20)


async def test_stop_token_ids_and_tokens_after_them() -> None:
    whole = answer(PROMPT, 8, 5)
    async with running([prefill_worker(), decode_worker()]) as router:
        responses = await router.generate(request(stop_token_ids=[whole[4]]))
        assert ids(responses) == whole[:5]
        assert responses[-1].finish_reason == STOP
        finished = request(stop_token_ids=[whole[4]])
        finished.output_token_ids.extend(whole[:5])
        assert (await router.generate(finished))[-1].finish_reason == STOP
        finished.output_token_ids.append(7)
        error = await failing(router.generate(finished))
        assert isinstance(error, Rejected)
        assert error.field == "output_token_ids[5]"


async def test_requests_at_once_do_not_mix() -> None:
    workers = [prefill_worker("p0"), prefill_worker("p1"), decode_worker(), decode_worker("d1")]
    async with running(workers) as router:
        results = await asyncio.gather(*(router.generate(request(20, seed=s)) for s in range(64)))
    for seed, responses in enumerate(results):
        assert ids(responses) == answer(PROMPT, 20, seed)
    assert all(worker.legs for worker in workers)


async def test_too_many_requests() -> None:
    step = asyncio.Semaphore(0)
    decode = decode_worker(behaviour=Behaviour(step=step))
    async with running([decode], max_requests=1) as router:
        first = asyncio.ensure_future(router.generate(request()))
        await decode.entered.wait()
        error = await failing(router.generate(request()))
        assert isinstance(error, Exhausted)
        assert error.retry_after > 0
        for _ in range(8):
            step.release()
        assert ids(await first) == answer(PROMPT, 8, 5)


async def test_a_draining_router_finishes_what_it_has() -> None:
    step = asyncio.Semaphore(0)
    decode = decode_worker(behaviour=Behaviour(step=step))
    async with running([decode]) as router:
        first = asyncio.ensure_future(router.generate(request()))
        await decode.entered.wait()
        drained = asyncio.ensure_future(router.service.gate.drain())
        await asyncio.sleep(0)
        assert isinstance(await failing(router.generate(request())), Unavailable)
        assert not drained.done()
        for _ in range(8):
            step.release()
        await first
        await asyncio.wait_for(drained, 20)


async def test_the_work_of_a_killed_worker_is_no_cache_hit() -> None:
    """Its leg has the account of its admission, though it died before its first token."""
    killed = prefill_worker(behaviour=Behaviour(hits=2, step=asyncio.Semaphore(0)))
    decode = decode_worker(behaviour=Behaviour(hits=8))  # it finds what the first one has saved
    async with running([killed, decode]) as router:
        call = asyncio.ensure_future(router.generate(request()))
        (known,) = router.registry.usable(killed.role)
        await until(lambda: known.heard_at > 0)  # the router has the account
        await killed.stop()
        usage = (await call)[-1].usage
    lost, last = usage.legs
    assert (lost.lost, lost.worker_id, lost.length) == (True, "p0", len(PROMPT))
    assert (lost.external, lost.computed, lost.generated) == (2, len(PROMPT) - 2, 0)
    assert [(part.store, part.tokens) for part in lost.external_by_store] == [("kvrelay://fake", 2)]
    assert (last.lost, last.external) == (False, 8)
    assert usage.cached_prompt_tokens == 2


async def test_hits_after_a_leg_that_was_lost_before_its_admission_are_not_known() -> None:
    """What the next worker finds may be what the first one has saved."""
    killed = prefill_worker(behaviour=Behaviour(die_after=0))
    decode = decode_worker(behaviour=Behaviour(hits=8))
    async with running([killed, decode]) as router:
        responses = await router.generate(request())
    usage = responses[-1].usage
    assert [(leg.lost, leg.admission_unknown) for leg in usage.legs] == [
        (True, True),
        (False, False),
    ]
    assert not usage.HasField("cached_prompt_tokens")
    assert not any(response.HasField("cached_prompt_tokens") for response in responses)


async def test_a_worker_that_refused_a_leg_has_saved_nothing() -> None:
    leaving = prefill_worker(behaviour=Behaviour(fail=Unavailable("leaving")))
    decode = decode_worker(behaviour=Behaviour(hits=8))
    async with running([leaving, decode]) as router:
        usage = (await router.generate(request()))[-1].usage
    assert [leg.lost for leg in usage.legs] == [True, False]
    assert usage.cached_prompt_tokens == 8
