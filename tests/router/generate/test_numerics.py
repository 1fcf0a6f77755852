"""A stream stays on workers of its numeric profile: legs, migration and resumption."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvrelay.errors import Mismatch, Unavailable
from kvrelay.v1 import router_pb2, worker_pb2
from tests.router.fakes import (
    Behaviour,
    FakeWorker,
    answer,
    decode_worker,
    ids,
    namespace,
    prefill_worker,
    running,
)
from tests.router.rig import PROMPT, failing, join, request, until

AVX2, AVX512 = "native/avx2/1111", "native/avx512/2222"
EXPECTED = answer(PROMPT, 8, 5)


def prefill(numerics: str, name: str = "p0") -> FakeWorker:
    return prefill_worker(name, namespace=profiled(numerics))


def decode(numerics: str, name: str = "d0", **behaviour: object) -> FakeWorker:
    behaves = Behaviour(**behaviour)  # type: ignore[arg-type]
    return decode_worker(name, namespace=profiled(numerics), behaviour=behaves)


def profiled(numerics: str) -> worker_pb2.Namespace:
    return namespace(numerics=numerics, digest=numerics.encode().ljust(32, b"."))


async def test_a_prefill_worker_of_another_profile_gets_no_leg() -> None:
    stranger, worker = prefill(AVX2), decode(AVX512)
    async with running([stranger, worker]) as router:
        responses = await router.generate(request())
        assert router.service.placer.mixed_numerics == 0
    assert ids(responses) == EXPECTED
    assert stranger.legs == []
    (leg,) = worker.legs
    assert leg.namespace_digest == worker.namespace.digest


async def test_a_new_stream_goes_where_there_is_room() -> None:
    step = asyncio.Semaphore(0)
    workers = [decode(AVX2, "d0", step=step), decode(AVX512, "d1", step=step)]
    async with running(workers) as router:
        first = router.call(request())
        await until(lambda: any(worker.legs for worker in workers))
        second = router.call(request())
        await until(lambda: all(worker.legs for worker in workers))
        first.cancel()
        second.cancel()
    assert [len(worker.legs) for worker in workers] == [1, 1]


async def test_a_stream_migrates_within_its_profile() -> None:
    step = asyncio.Semaphore(1)
    dying, stranger = decode(AVX512, "d0", step=step), decode(AVX2, "d1")
    spare = decode(AVX512, "d2")
    async with running([dying, stranger]) as router:
        call = aiter(router.call(request()))
        got = [await anext(call)]
        await join(router, dying, stranger, spare)
        await router.settled(used=3)
        step.release()
        step.release()
        got += [await anext(call) for _ in range(2)]
        await dying.stop()  # what it had sent is here: a broken connection may lose the last token
        got += [response async for response in call]
        assert router.service.placer.mixed_numerics == 0
        await spare.stop()
    assert ids(got) == EXPECTED
    assert list(spare.legs[0].output_token_ids) == EXPECTED[:3]
    assert stranger.legs == []


async def test_a_stream_whose_profile_is_gone_ends_failed_precondition() -> None:
    dying, stranger = decode(AVX512, "d0", die_after=3), decode(AVX2, "d1")
    async with running([dying, stranger], resume_wait=0.5) as router:
        call = router.call(request())
        error = await failing(_drained(call))
        assert router.service.placer.mixed_numerics == 0
    assert isinstance(error, Mismatch), error
    assert error.field == "numerics"
    assert AVX512 in error.message
    assert stranger.legs == []


async def test_a_stream_without_output_begins_on_another_profile() -> None:
    dying, other = decode(AVX512, "d0", die_after=0), decode(AVX2, "d1")
    async with running([dying, other]) as router:
        responses = await router.generate(request())
    assert ids(responses) == EXPECTED
    assert responses[0].weights == f"r/float32/{AVX2}"
    assert other.legs[-1].namespace_digest == other.namespace.digest


async def test_a_resumed_stream_goes_to_its_profile_or_is_refused() -> None:
    old, new = decode(AVX2, "d0"), decode(AVX512, "d1")
    async with running([old, new]) as router:
        for worker in (new, old, new):
            resumed = request()
            resumed.output_token_ids.extend(EXPECTED[:4])
            resumed.weights = f"r/float32/{worker.namespace.numerics}"
            assert ids(await router.generate(resumed)) == EXPECTED[4:]
        resumed.weights = "r/float32/native/neon/3333"
        error = await failing(_drained(router.call(resumed)))
    assert isinstance(error, Mismatch)
    assert error.field == "weights"
    assert (len(old.legs), len(new.legs)) == (1, 2)


def resumed(numerics: str) -> router_pb2.GenerateRequest:
    """A stream that began on this profile, with four tokens so far."""
    result = request()
    result.output_token_ids.extend(EXPECTED[:4])
    result.weights = f"r/float32/{numerics}"
    return result


@pytest.mark.parametrize("listed", [True, False])
async def test_a_resumed_stream_waits_for_the_only_worker_of_its_profile(listed: bool) -> None:
    """It is being restarted, at its address or, while it is not listed, at another one."""
    old, new = decode(AVX2, "d0"), decode(AVX512, "d1")
    again = decode(AVX2, "d0-again")
    async with running([old, new], health_interval=0.05) as router:
        if not listed:
            await join(router, new)
        await old.stop()
        await router.settled(used=1)
        call = asyncio.ensure_future(router.generate(resumed(AVX2)))
        await asyncio.sleep(0.5)
        assert not call.done()
        await again.start(old.address if listed else "127.0.0.1:0")
        if not listed:
            await join(router, new, again)
        assert ids(await call) == EXPECTED[4:]
        assert (len(again.legs), len(new.legs)) == (1, 0)
        await again.stop()


async def test_a_profile_that_does_not_come_back_is_named() -> None:
    old, new = decode(AVX2, "d0"), decode(AVX512, "d1")
    async with running([old, new], health_interval=0.05, resume_wait=0.5) as router:
        await old.stop()
        await router.settled(used=1)
        error = await failing(_drained(router.call(resumed(AVX2))))
        assert isinstance(error, Mismatch)
        assert error.field == "weights"
        assert f"numeric profile {AVX2!r}" in error.message
        assert "resume it later" in error.message
        assert "start it again" in error.message
        assert not new.legs


async def test_other_weights_are_refused_at_once_though_a_worker_may_come() -> None:
    worker, absent = decode(AVX512), decode(AVX512, "d1")
    absent.address = "127.0.0.1:9"  # nothing listens there
    async with running([worker], resume_wait=30.0) as router:
        await join(router, worker, absent)
        stream = resumed(AVX512)
        stream.weights = f"s/float32/{AVX512}"
        error = await failing(_drained(router.call(stream, 10)))
        assert isinstance(error, Mismatch)
        assert "the stream began with 's/float32" in error.message


async def test_a_resumed_stream_waits_longer_than_a_new_one_when_there_is_no_worker() -> None:
    only, again = decode(AVX2, "d0"), decode(AVX2, "d0-again")
    async with running([only], health_interval=0.05, worker_wait=0.2) as router:
        await only.stop()
        await router.settled(used=0)
        assert isinstance(await failing(_drained(router.call(request()))), Unavailable)
        call = asyncio.ensure_future(router.generate(resumed(AVX2)))
        await asyncio.sleep(0.6)
        assert not call.done()
        await again.start(only.address)
        assert ids(await call) == EXPECTED[4:]
        await again.stop()


@pytest.mark.parametrize("same", [True, False])
async def test_loose_workers_mix_and_are_counted(same: bool) -> None:
    """Without numerics in the namespace every worker continues every stream."""
    begins = prefill_worker(numeric_profile=AVX2)
    ends = decode_worker(numeric_profile=AVX2 if same else AVX512)
    async with running([begins, ends]) as router:
        responses = await router.generate(request())
        assert router.service.placer.mixed_numerics == (0 if same else 1)
    assert ids(responses) == EXPECTED
    assert (len(begins.legs), len(ends.legs)) == (1, 1)
    assert responses[0].weights == "r/float32"


async def _drained(
    call: grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
) -> None:
    async for _ in call:
        pass
