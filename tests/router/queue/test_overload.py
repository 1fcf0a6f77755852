"""More requests than the workers can run: which wait, run next, are refused, leave."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from typing import TypeAlias

import grpc
import pytest

from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError, Rejected
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.security.identity import Caller, CallerKind, Tenant
from kvrelay.rpc.status import from_rpc_error
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router import service
from router.generate import generation
from router.generate.generation import Generation
from router.queue import prompts
from tests.fuzz import wire
from tests.router.fakes import Behaviour, FakeWorker, Running, answer, decode_worker, ids, running

Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)
SLOTS = 3  # of a worker that runs two


def request(prompt: int, priority: int = 0, tokens: int = 4) -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(max_tokens=tokens, priority=priority)
    message.token_ids.ids.append(prompt)
    message.sampling.seed = 1
    return message


def held() -> FakeWorker:
    """Runs two requests at once; each token waits for a permit."""
    behaviour = Behaviour(step=asyncio.Semaphore(0))
    return decode_worker(max_num_seqs=2, behaviour=behaviour)


async def status(router: Running) -> router_pb2.QueueStatus:
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    return (await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=10)).queue


async def waiting(router: Running, count: int, slots: int = SLOTS) -> None:
    """Until ``count`` requests wait and ``slots`` run."""
    async with asyncio.timeout(20):
        while True:
            seen = await status(router)
            if (seen.waiting, seen.running) == (count, slots):
                return
            await asyncio.sleep(0.01)


async def refusal(
    router: Running, message: router_pb2.GenerateRequest, seconds: float
) -> KvrelayError:
    with pytest.raises(grpc.RpcError) as refused:
        await router.generate(message, seconds)
    return from_rpc_error(refused.value)


async def error_of(call: Call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_workers_get_what_they_can_run_and_the_rest_waits() -> None:
    worker = held()
    async with running([worker]) as router:
        calls = [asyncio.ensure_future(router.generate(request(n))) for n in range(10)]
        await waiting(router, 10 - SLOTS)
        assert len(worker.legs) == SLOTS
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        got = [ids(await call) for call in calls]
        assert got == [answer([n], 4, 1) for n in range(10)]
        seen = await status(router)
        assert (seen.running, seen.waiting, seen.waiting_tokens) == (0, 0, 0)


async def test_the_wait_in_the_queue_is_in_the_usage() -> None:
    """The fake workers say that each leg waits 0.125 s there."""
    worker = held()
    async with running([worker]) as router:
        calls = [asyncio.ensure_future(router.generate(request(n))) for n in range(SLOTS)]
        await waiting(router, 0)
        call = asyncio.ensure_future(router.generate(request(50)))
        await waiting(router, 1)
        begun = time.monotonic()
        await asyncio.sleep(0.2)
        waited = time.monotonic() - begun
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        usages = [(await one)[-1].usage for one in (*calls, call)]
    assert usages[-1].queue_seconds > 0.125 + waited
    assert usages[-1].first_token_seconds > usages[-1].queue_seconds - 0.125
    assert all(0.125 < usage.queue_seconds < usages[-1].queue_seconds for usage in usages[:-1])


async def test_a_client_that_leaves_the_queue_leaves_at_once() -> None:
    worker = held()
    async with running([worker]) as router:
        calls = [router.call(request(n)) for n in range(SLOTS + 4)]
        await waiting(router, 4)
        for call in calls[SLOTS:]:
            call.cancel()
        await waiting(router, 0)
        later = router.call(request(50))
        await waiting(router, 1)
        calls[0].cancel()  # its slot goes to the waiting request
        await waiting(router, 0)
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        assert ids([response async for response in later]) == answer([50], 4, 1)


async def test_a_client_that_leaves_as_its_turn_comes() -> None:
    """In one iteration of the event loop: the slot is not lost to the request that left."""
    async with running([held()]) as router:
        gate = router.service.gate

        async def stay() -> None:
            async with gate.passed(4, 0, Tenant(), Deadline.after(60)):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(stay())
        await asyncio.sleep(0)
        assert gate.status(0).running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert gate.status(0).running == 0


async def test_priorities_order_those_that_wait() -> None:
    worker = held()
    async with running([worker]) as router:
        calls = [asyncio.ensure_future(router.generate(request(n))) for n in range(SLOTS)]
        await waiting(router, 0)
        for count, priority in enumerate((0, -8, 8, 1), 1):
            message = request(100 + priority, priority)
            calls.append(asyncio.ensure_future(router.generate(message)))
            await waiting(router, count)
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        await asyncio.gather(*calls)
        order = [leg.prompt_token_ids[0] - 100 for leg in worker.legs[SLOTS:]]
        assert order == [8, 1, 0, -8]


async def test_a_full_queue_refuses_and_says_when_to_ask_again() -> None:
    worker = held()
    async with running([worker], queue_tokens=12) as router:
        calls = [router.call(request(n)) for n in range(SLOTS + 3)]  # of four tokens each
        await waiting(router, 3)
        error = await refusal(router, request(9), 20)
        assert isinstance(error, Exhausted)
        assert error.retry_after > 0
        assert (await status(router)).refused == 1
        for call in calls:
            call.cancel()


async def test_requests_of_one_tenant_do_not_take_every_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``max_requests`` bounds all that are there; the queue's tokens would let far more wait."""
    tenant = Tenant("greedy")
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))
    async with running([held()], max_requests=SLOTS + 6) as router:
        calls = [router.call(request(n)) for n in range(SLOTS + 6)]
        await waiting(router, 6)
        assert isinstance(await refusal(router, request(50), 20), Exhausted)
        tenant = Tenant("small")
        calls += [router.call(request(60 + n)) for n in range(3)]
        greedy = [asyncio.ensure_future(error_of(call)) for call in calls[: SLOTS + 6]]
        async with asyncio.timeout(20):
            left = set(greedy)
            while len(left) > SLOTS + 3:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        pushed_out = [await task for task in greedy if task.done()]
        assert all(isinstance(from_rpc_error(error), Exhausted) for error in pushed_out)
        await waiting(router, 6)
        assert isinstance(await refusal(router, request(70), 20), Exhausted)  # it has its half
        assert (await status(router)).refused == 5
        for call in calls:
            call.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_long_prompts_of_one_tenant_do_not_take_every_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait to be tokenized, before they enter the queue."""
    tenant, go_on, places = Tenant("greedy"), threading.Event(), 12
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))

    def encode(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        assert go_on.wait(20)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(prompts, "THREADS", 2)  # one of each tenant
    long = router_pb2.GenerateRequest(prompt="x" * (prompts.LONG_TEXT + 1), max_tokens=1)
    async with running([decode_worker()], max_requests=places) as router:
        greedy = [asyncio.ensure_future(router.generate(long)) for _ in range(places)]
        async with asyncio.timeout(20):
            while True:
                if router.service.quotas.requests(tenant) == places:
                    break
                await asyncio.sleep(0.01)
        refused = await refusal(router, long, 20)
        assert f"{places} requests are under way" in str(refused)
        tenant = Tenant("small")
        for n in range(3):
            assert ids(await router.generate(request(n))) == answer([n], 4, 1)
        error = await refusal(router, long, 0.2)  # it is open, and waits too long for its slot
        assert isinstance(error, DeadlineExceeded)
        go_on.set()
        got = await asyncio.gather(*greedy, return_exceptions=True)
        errors = [from_rpc_error(one) for one in got if isinstance(one, grpc.RpcError)]
        assert 0 < len(errors) <= 5  # a place may be taken before the evicted request has left
        assert all(isinstance(one, Exhausted) for one in errors)
        assert router.service.gate.refused["evicted"] == len(errors)


async def test_what_one_tenant_resumes_does_not_take_every_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text of many tokens is made in threads, in a few slots of each tenant."""
    tenant, go_on, inside = Tenant("greedy"), threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))
    monkeypatch.setattr(generation, "MANY_TOKENS", 2)
    monkeypatch.setattr(prompts, "THREADS", 2)  # one of each tenant
    replay = Generation.replay_tokens

    def slow(self: Generation) -> None:
        inside.release()
        assert go_on.wait(20)
        replay(self)

    monkeypatch.setattr(Generation, "replay_tokens", slow)
    begun = answer([5], 4, 1)
    message = request(5, tokens=4)
    message.output_token_ids.extend(begun[:3])
    async with running([decode_worker()]) as router:
        greedy = [asyncio.ensure_future(router.generate(message)) for _ in range(8)]
        assert await asyncio.to_thread(inside.acquire, timeout=20)
        assert isinstance(await refusal(router, message, 0.2), DeadlineExceeded)
        tenant = Tenant("small")
        other = asyncio.ensure_future(router.generate(message))
        assert await asyncio.to_thread(inside.acquire, timeout=20)
        assert not inside.acquire(blocking=False)
        go_on.set()
        for call in (*greedy, other):
            assert ids(await call) == begun[3:]


async def test_refusals_by_quota_are_counted_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenant = Tenant("alice", max_requests=1)
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))
    worker = held()
    async with running([worker]) as router:
        call = router.call(request(1))
        await worker.entered.wait()
        for _ in range(2):
            assert "its limit" in str(await refusal(router, request(2), 20))
        assert (await status(router)).refused == 2
        call.cancel()


async def test_who_is_refused_has_used_nothing_of_its_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenant = Tenant("alice", tokens_per_minute=60)
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))
    async with running([held()], queue_tokens=1) as router:
        calls = [router.call(request(n, tokens=1)) for n in range(SLOTS)]
        await waiting(router, 0)
        message = request(1, tokens=10)
        message.token_ids.ids.extend([1] * 29)
        for _ in range(3):
            error = await refusal(router, message, 20)
            assert "are waiting" in str(error)  # not its quota
        for call in calls:
            call.cancel()


async def test_samples_that_could_never_wait_together_are_told_so() -> None:
    """Three run at once, so that three of six wait: to ask again would not help."""
    message = request(1, tokens=10)
    message.n = 6
    async with running([decode_worker(max_num_seqs=2)], queue_tokens=30) as router:
        assert len(await router.generate(message, 20)) > 0
    async with running([decode_worker(max_num_seqs=2)], queue_tokens=29) as router:
        error = await refusal(router, message, 20)
        assert isinstance(error, Exhausted)
        told = "n: 3 of 6 answers would have to wait, with up to 30 tokens, and at most 29 may"
        assert f"{told} (--queue-tokens): ask for fewer or shorter answers" in str(error)
        assert (await status(router)).refused == 1


async def test_who_waits_in_vain_is_told_at_its_deadline() -> None:
    worker = held()
    async with running([worker]) as router:
        calls = [router.call(request(n)) for n in range(SLOTS)]
        await waiting(router, 0)
        assert isinstance(await refusal(router, request(9), 0.3), DeadlineExceeded)
        await waiting(router, 0)
        for call in calls:
            call.cancel()


async def test_nobody_waits_longer_than_twice_what_may_be_expected() -> None:
    worker = held()
    async with running([worker], queue_seconds=0.1) as router:
        calls = [router.call(request(n)) for n in range(SLOTS)]
        await waiting(router, 0)
        assert isinstance(await refusal(router, request(9), 20), Exhausted)
        for call in calls:
            call.cancel()


async def test_another_worker_makes_room_for_those_that_wait() -> None:
    first, second = held(), decode_worker("d1")
    async with running([first, second], used=2) as router:
        assert (await status(router)).slots == 83
        await second.stop()
        await router.settled(used=1)
        left = {asyncio.ensure_future(router.generate(request(n))) for n in range(SLOTS + 2)}
        await waiting(router, 2)
        await second.start(second.address)
        while len(left) > SLOTS:  # those that the first one holds
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            assert all(ids(call.result()) for call in done)
        for call in left:
            call.cancel()


@pytest.mark.parametrize("priority", [-9, 9])
async def test_priorities_are_bounded(priority: int) -> None:
    async with running([decode_worker()]) as router:
        error = await refusal(router, request(1, priority), 20)
        assert isinstance(error, Rejected)
        assert error.field == "priority"


async def test_a_worker_that_is_full_is_left_alone_for_as_long_as_it_says() -> None:
    worker, asked = decode_worker(), []
    worker.behaviour.fail = Exhausted("full", 0.5)
    async with running([worker]) as router:
        for turn in range(20):
            error = await refusal(router, request(turn), 20)
            assert isinstance(error, Exhausted)
            assert 0 < error.retry_after <= 0.5
            asked.append(len(worker.legs))
            if asked[-1] > 1:
                break  # a slow machine: the rest was over
        assert asked[:2] == [1, 1] or asked[-1] == 2
        worker.behaviour.fail = None
        async with asyncio.timeout(20):
            while True:
                try:
                    got = ids(await router.generate(request(9)))
                    break
                except grpc.RpcError as error:
                    told = from_rpc_error(error)
                    assert isinstance(told, Exhausted)
                    await asyncio.sleep(told.retry_after)
        assert got == answer([9], 4, 1)


async def test_a_tenant_with_many_requests_does_not_hold_up_another_one() -> None:
    order: list[str] = []
    async with running([decode_worker(max_num_seqs=2)]) as router:
        gate, done = router.service.gate, asyncio.Event()

        async def ask(tenant: str) -> None:
            async with gate.passed(100, 0, Tenant(tenant), Deadline.after(20)):
                order.append(tenant)
                await done.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(SLOTS + 20):
                group.create_task(ask("greedy"))
            await waiting(router, 20)
            group.create_task(ask("small"))
            await waiting(router, 21)
            done.set()
    assert order.index("small") <= SLOTS + 1, "the greedy one's next request, then it"


async def test_who_leaves_as_its_turn_comes_leaves() -> None:
    """Both happen in one iteration of the event loop."""
    worker = held()
    async with running([worker]) as router:
        gate, inside = router.service.gate, asyncio.Event()
        calls = [router.call(request(n)) for n in range(SLOTS)]
        await waiting(router, 0)

        async def ask() -> None:
            async with gate.passed(4, 0, Tenant(), Deadline.after(20)):
                inside.set()
                await asyncio.sleep(20)

        task = asyncio.create_task(ask())
        await waiting(router, 1)
        gate._apply(gate._admission.resize(SLOTS + 1, time.monotonic()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not inside.is_set()
        await waiting(router, 0)
        for call in calls:
            call.cancel()


async def test_requests_under_way_do_not_take_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run more requests than the router takes: waiting ones are still chosen fairly."""
    tenant, places = Tenant("greedy"), 8
    monkeypatch.setattr(service, "caller", lambda: Caller(CallerKind.CLIENT, tenant))
    worker = decode_worker(max_num_seqs=64, behaviour=Behaviour(step=asyncio.Semaphore(0)))
    async with running([worker], max_requests=places) as router:
        greedy = [asyncio.ensure_future(router.generate(request(n))) for n in range(places)]
        await waiting(router, places // 4, places - places // 4)
        assert isinstance(await refusal(router, request(50), 20), Exhausted)
        tenant = Tenant("small")
        small = asyncio.ensure_future(router.generate(request(60)))
        done, left = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
        (error,) = (one.exception() for one in done)
        assert isinstance(error, grpc.RpcError)
        assert isinstance(from_rpc_error(error), Exhausted)
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        assert ids(await small) == answer([60], 4, 1)
        await asyncio.gather(*left)


async def test_text_of_resumed_tokens_is_made_for_those_whose_turn_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for waiting or refused requests: a client that retries for ever cannot keep it busy."""
    worker, made = held(), list[int]()
    replay = Generation.replay_tokens

    def noting(self: Generation) -> None:
        made.append(self.so_far)
        replay(self)

    monkeypatch.setattr(Generation, "replay_tokens", noting)
    message = request(5, tokens=4)
    message.output_token_ids.extend(answer([5], 3, 1))
    async with running([worker], queue_tokens=5) as router:
        calls = [router.call(request(n)) for n in range(SLOTS)]
        await waiting(router, 0)
        last = asyncio.ensure_future(router.generate(message))
        await waiting(router, 1)
        assert isinstance(await refusal(router, message, 20), Exhausted)
        assert made == [0] * SLOTS
        for call in calls:
            call.cancel()
        assert worker.behaviour.step is not None
        for _ in range(100):
            worker.behaviour.step.release()
        assert ids(await last) == answer([5], 4, 1)[3:]
        assert made == [*[0] * SLOTS, 3]


async def test_who_reads_nothing_keeps_no_slot() -> None:
    """It answers pings, and its deadline is an hour away."""
    worker = decode_worker(max_num_seqs=2)
    window = struct.pack(">HI", 4, 0)  # of each stream, in bytes
    async with running([worker], stuck_after=1.5) as router, asyncio.timeout(60):
        host, port = router.address.split(":")
        raw = request(1, tokens=200).SerializeToString()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(wire.PREFACE + wire.frame(wire.SETTINGS, 0, 0, window))
        for stream in (1, 3, 5):
            block = wire.headers("/kvrelay.v1.RouterService/Generate", None)
            body = struct.pack(">BI", 0, len(raw)) + raw
            writer.write(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, block))
            writer.write(wire.frame(wire.DATA, wire.END_STREAM, stream, body))
        await waiting(router, 0)
        assert ids(await router.generate(request(9))) == answer([9], 4, 1)
        await waiting(router, 0, 0)
        assert router.service.ended["cancelled"] == SLOTS
        writer.close()
