"""A stream stays on workers of its numeric profile: legs, migration and resumption."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvrelay.errors import Mismatch
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
from tests.router.rig import PROMPT, failing, join, request

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
    workers = [decode(AVX2, "d0"), decode(AVX512, "d1")]
    async with running(workers) as router:
        first = router.call(request(max_tokens=300))
        assert ids([await first.read()])  # type: ignore[list-item]
        second = router.call(request(max_tokens=300))
        assert ids([await second.read()])  # type: ignore[list-item]
        first.cancel()
        second.cancel()
    assert [len(worker.legs) for worker in workers] == [1, 1]


async def test_a_stream_migrates_within_its_profile() -> None:
    step = asyncio.Semaphore(1)
    dying, stranger = decode(AVX512, "d0", die_after=3, step=step), decode(AVX2, "d1")
    spare = decode(AVX512, "d2")
    async with running([dying, stranger]) as router:
        call = aiter(router.call(request()))
        got = [await anext(call)]
        await join(router, dying, stranger, spare)
        await router.settled(used=3)
        step.release()
        step.release()
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
