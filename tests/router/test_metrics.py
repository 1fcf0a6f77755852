"""The router's metrics for Prometheus."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.errors import Unavailable
from kvrelay.v1 import router_pb2
from router.metrics import PREFIX, registry_of
from tests.router.fakes import Behaviour, decode_worker, ids, model, prefill_worker, running
from tests.router.rig import join


def request(tokens: int = 4) -> router_pb2.GenerateRequest:
    message = router_pb2.GenerateRequest(max_tokens=tokens)
    message.token_ids.ids.extend([1, 2, 3])
    message.sampling.seed = 1
    return message


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, {"model_name": model().name, **labels})


async def until(page: CollectorRegistry, wanted: float, name: str, **labels: str) -> None:
    async with asyncio.timeout(20):
        for _ in range(10_000):
            if value(page, name, **labels) == wanted:
                return
            await asyncio.sleep(0.01)


async def test_requests_legs_and_workers() -> None:
    step = asyncio.Semaphore(0)
    prefill, first = prefill_worker(), decode_worker(behaviour=Behaviour(step=step))
    async with running([prefill, first], max_requests=1) as router:
        page = registry_of(router.service)
        call = asyncio.ensure_future(router.generate(request()))
        await first.entered.wait()
        assert value(page, "running_requests") == 1
        in_flight = {"worker": first.address, "role": "decode", "state": "ready"}
        assert value(page, "worker_in_flight", **in_flight) == 1
        for _ in range(2):
            with pytest.raises(grpc.RpcError):
                await router.generate(request())
        assert value(page, "refused_requests_total", reason="too_many") == 2
        assert value(page, "requests_total", ended="resource_exhausted") == 2
        for _ in range(8):
            step.release()
        assert len(ids(await call)) == 4
        with pytest.raises(grpc.RpcError):
            await router.generate(request(0))
        assert value(page, "requests_total", ended="invalid_argument") == 1
        assert value(page, "requests_total", ended="finished") == 1
        assert value(page, "generation_tokens_total") == 4
        assert (value(page, "decision_seconds_count") or 0) >= 2
        assert value(page, "worker_in_flight", **in_flight) == 0
        assert value(page, "running_requests") == 0
        left = router.call(request(50))
        await until(page, 1, "running_requests")
        left.cancel()
        await until(page, 1, "requests_total", ended="cancelled")


async def test_retries() -> None:
    failing = prefill_worker(behaviour=Behaviour(fail=Unavailable("not today")))
    async with running([failing, decode_worker()]) as router:
        page = registry_of(router.service)
        assert len(ids(await router.generate(request()))) == 4
        assert value(page, "retried_legs_total", next="suspect") == 1
        assert value(page, "migrations_total") == 0


async def test_a_worker_that_dies_under_a_stream_is_lost_once() -> None:
    """Its leg fails first, then its check."""
    prefill, calm = prefill_worker(), decode_worker("d1")
    dying = decode_worker("d0", behaviour=Behaviour(die_after=2))
    async with running([prefill, dying]) as router:
        page = registry_of(router.service)
        call = asyncio.ensure_future(router.generate(request(8)))
        await until(page, 1, "lost_workers_total", role="decode")
        await join(router, prefill, dying, calm)
        assert len(ids(await call)) == 8
        assert value(page, "lost_workers_total", role="decode") == 1
        assert value(page, "lost_workers_total", role="prefill") == 0
        await calm.stop()


async def test_totals_for_top() -> None:
    """A resumed request adds its new tokens, but no time to a first token."""
    async with running([prefill_worker(), decode_worker()]) as router:
        whole = ids(await router.generate(request()))
        totals = router.service.totals
        assert (totals.generation_tokens, totals.first_tokens) == (4, 1)
        assert totals.prompt_tokens == 3
        seconds = totals.first_token_seconds
        assert seconds > 0
        resumed = request()
        resumed.output_token_ids.extend(whole[:2])
        assert ids(await router.generate(resumed)) == whole[2:]
        assert (totals.generation_tokens, totals.first_tokens) == (6, 1)
        assert totals.first_token_seconds == seconds


def counted(registry: CollectorRegistry, name: str) -> tuple[float, float]:
    """Number and sum of what a histogram observed."""
    labels = {"model_name": model().name}
    count = registry.get_sample_value(f"kvrelay:{name}_count", labels)
    total = registry.get_sample_value(f"kvrelay:{name}_sum", labels)
    assert count is not None
    assert total is not None
    return count, total


async def test_histograms_of_what_clients_see() -> None:
    """Four tokens with 50 ms between them, a resumed request, a refused one, three samples."""
    step = asyncio.Semaphore(0)

    async def pace() -> None:
        await paced.entered.wait()  # a token that waits for no permit comes without a gap
        while True:
            await asyncio.sleep(0.05)
            step.release()

    paced = decode_worker(behaviour=Behaviour(step=step))
    async with running([prefill_worker(), paced]) as router, asyncio.TaskGroup() as tasks:
        pacing = tasks.create_task(pace())
        page = registry_of(router.service)
        began = time.monotonic()
        whole = ids(await router.generate(request()))
        lasted = time.monotonic() - began
        assert counted(page, "time_to_first_token_seconds")[0] == 1
        assert counted(page, "inter_token_latency_seconds")[0] == 3
        gaps, first = (
            counted(page, f"{name}_seconds")[1]
            for name in ("inter_token_latency", "time_to_first_token")
        )
        assert gaps >= 0.1
        count, whole_time = counted(page, "e2e_request_latency_seconds")
        assert count == 1
        assert first + gaps <= whole_time <= lasted
        assert counted(page, "request_decode_time_seconds")[1] == pytest.approx(gaps)
        assert counted(page, "request_time_per_output_token_seconds")[1] == pytest.approx(gaps / 3)
        assert counted(page, "request_prompt_tokens") == (1, 3)
        assert counted(page, "request_generation_tokens") == (1, 4)
        assert counted(page, "request_params_max_tokens") == (1, 4)
        assert counted(page, "request_tokenize_time_seconds")[0] == 1
        assert counted(page, "request_queue_time_seconds")[0] == 1

        resumed = request()
        resumed.output_token_ids.extend(whole[:2])
        assert ids(await router.generate(resumed)) == whole[2:]
        assert counted(page, "time_to_first_token_seconds")[0] == 1
        assert counted(page, "inter_token_latency_seconds")[0] == 4
        assert counted(page, "request_generation_tokens") == (2, 6)

        with pytest.raises(grpc.RpcError):
            await router.generate(request(0))
        assert counted(page, "e2e_request_latency_seconds")[0] == 2

        several = request()
        several.n = 3
        await router.generate(several)
        assert counted(page, "time_to_first_token_seconds")[0] == 2
        assert counted(page, "inter_token_latency_seconds")[0] == 4 + 3 * 3
        assert counted(page, "request_generation_tokens") == (5, 6 + 12)
        assert counted(page, "request_params_n") == (3, 5)
        assert counted(page, "request_queue_time_seconds")[0] == 5
        pacing.cancel()
