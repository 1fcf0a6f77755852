"""A router, a real store and hints between them: what they keep, and what they leave alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvrelay.block.header import Header, checksum, encode
from kvrelay.block.name import Namer
from kvrelay.client.parameters import Parameters
from kvrelay.errors import Rejected
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.security.identity import Tenant
from kvrelay.v1 import router_pb2, router_pb2_grpc, worker_pb2
from kvrelay.v1.router_pb2 import RETENTION_TOOL_CALL, RETENTION_TURN_ENDS
from kvstore import Block, Store, connect
from kvstore.base import NameQuery
from kvstore.stats import StoreCounters
from router.placement.placer import namespace_of
from router.queue.hint_sender import HintSender
from router.queue.hints import HintQueue
from tests.kvstore.conftest import start_service, stop
from tests.kvstore.rig import TIMEOUT, make, put
from tests.router.fakes import (
    BLOCK,
    FakeWorker,
    Running,
    answer,
    decode_worker,
    ids,
    model,
    namespace,
    running,
)
from tests.router.rig import failing, request, until

Call = grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]
SIZE = 64 << 10
ROOM = 24
"""Blocks of a store."""
SPACE = namespace_of(worker_pb2.WorkerInfo(namespace=namespace()), Tenant())


@pytest.fixture
def url() -> Iterator[str]:
    process, url = start_service(f"--budget={ROOM * (SIZE + 1024)}", "--eviction=lru")
    yield url
    stop(process)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = connect(url)
    yield store
    store.close()


def blocks_of(tokens: Sequence[int]) -> list[Block]:
    """The full blocks of a sequence, as workers of the fake fleet would store them."""
    namer, blocks = Namer(SPACE), []
    parent = namer.root
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        part = tuple(tokens[end - BLOCK : end])
        payload = bytes(SIZE)
        header = Header(
            namespace=SPACE.digest,
            parent=parent,
            name=namer.child(parent, part),
            tokens=part,
            dtype="uint8",
            shape=(1, SIZE),
            payload_bytes=SIZE,
            checksums=(checksum(payload),),
        )
        parent = header.name
        blocks.append(Block(encode(header), memoryview(payload)))
    return blocks


def found(store: Store, tokens: Sequence[int]) -> int:
    """How many leading blocks of a sequence are stored."""
    names = Namer(SPACE).chain(tokens, BLOCK)
    return store.lookup(NameQuery(names), TIMEOUT).lead


def press(store: Store) -> None:
    """Put as many other blocks as there is room for."""
    for _ in range(ROOM // 2):
        put(store, make(SIZE), make(SIZE))


def prompt(first: int, max_tokens: int = 4, **fields: object) -> router_pb2.GenerateRequest:
    made = request(max_tokens)
    made.token_ids.ids[:] = [first, *range(20, 35)]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@asynccontextmanager
async def telling(router: Running, url: str) -> AsyncIterator[None]:
    """The sender of the router's process, faster."""
    task = asyncio.create_task(HintSender(url, router.service.hints, interval=0.05).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("told", [True, False])
async def test_the_blocks_of_a_prompt_that_waits_survive_pressure(
    url: str, store: Store, told: bool
) -> None:
    """The worker runs two requests; the third waits in the router's queue."""
    worker = decode_worker(max_num_seqs=1)
    worker.behaviour.step = asyncio.Semaphore(0)
    requests = [prompt(first) for first in (1, 2, 3)]
    waiting = list(requests[2].token_ids.ids)
    async with running([worker], store=url, disaggregate="never") as router:
        calls = [asyncio.create_task(router.generate(one)) for one in requests[:2]]
        await until(lambda: router.service.queue_status().running == 2)
        calls.append(asyncio.create_task(router.generate(requests[2])))
        await until(lambda: router.service.queue_status().waiting == 1)
        await asyncio.to_thread(put, store, *blocks_of(waiting))
        if told:
            async with telling(router, url):
                await until(lambda: router.service.hints.counts["sent"] >= 3)
        await asyncio.to_thread(press, store)
        assert await asyncio.to_thread(found, store, waiting) == (4 if told else 0)
        worker.behaviour.step.release()
        for _ in range(20):
            worker.behaviour.step.release()
        for one, call in zip(requests, calls, strict=True):
            assert ids(await call) == answer(one.token_ids.ids, 4, 5)


@pytest.mark.parametrize(
    ("retention", "kept"), [(RETENTION_TOOL_CALL, True), (RETENTION_TURN_ENDS, False)]
)
async def test_what_a_client_expects_decides_what_goes_first(
    url: str, store: Store, retention: router_pb2.Retention.ValueType, kept: bool
) -> None:
    """Beside another conversation, which was used earlier and later, respectively."""
    one = prompt(1, 8, retention=retention)
    tokens = [*one.token_ids.ids, *answer(one.token_ids.ids, 8, 5)]
    other = [7, *range(20, 43)]
    order = [tokens, other] if kept else [other, tokens]
    async with running([decode_worker()], store=url) as router, telling(router, url):
        for sequence in order:
            await asyncio.to_thread(put, store, *blocks_of(sequence))
        assert ids(await router.generate(one)) == tokens[16:]
        await until(lambda: router.service.hints.counts["sent"] >= 1)
        for _ in range((ROOM - 6) // 2):
            await asyncio.to_thread(put, store, make(SIZE), make(SIZE))
        left = [await asyncio.to_thread(found, store, one) for one in (tokens, other)]
        assert left == ([6, 0] if kept else [0, 6])


async def test_a_store_that_dies_or_knows_no_hints_changes_nothing() -> None:
    process, url = start_service("--budget=4MiB")
    worker = decode_worker()
    async with running([worker], store=url) as router:
        older = f"kvrelay://{worker.address}"  # a server without this method
        async with telling(router, f"{url},{older},redis://127.0.0.1:1"):
            first = prompt(1, retention=RETENTION_TOOL_CALL)
            assert ids(await router.generate(first)) == answer(first.token_ids.ids, 4, 5)
            hints = router.service.hints
            await until(lambda: hints.counts == {"sent": 1, "dropped": 1})
            stop(process)
            for number in range(2, 5):
                one = prompt(number, retention=RETENTION_TOOL_CALL)
                assert ids(await router.generate(one)) == answer(one.token_ids.ids, 4, 5)
            await until(lambda: hints.counts["dropped"] >= 7)
            assert hints.counts["sent"] == 1
            assert router.service.ended == {"finished": 4}


async def test_a_retention_that_is_unknown_is_refused_by_name() -> None:
    async with running([decode_worker()]) as router:
        error = await failing(router.call(prompt(1, retention=9)).read())
        assert isinstance(error, Rejected)
        assert error.field == "retention"


def test_the_client_sends_it_and_refuses_others() -> None:
    message = Parameters(prompt="x", retention="tool_call").message()
    assert message.retention == RETENTION_TOOL_CALL
    assert not Parameters(prompt="x").message().retention
    for wrong in ("forever", 1, ["tool_call"]):
        with pytest.raises(Rejected, match="retention: must be one of turn_ends, tool_call"):
            Parameters(prompt="x", retention=wrong).message()  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["kvrelay://nowhere", "kvrelay://:9", "kvrelay://[::1"])
def test_a_store_that_has_no_address_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(Rejected, match="store"):
        HintSender(wrong, HintQueue(enabled=True))


@asynccontextmanager
async def process(worker: FakeWorker, url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A router as a process of its own, before one worker: its address, and how to kill it."""
    flags = ["--model", str(model()), "--decode", worker.address, "--store", url, "--port", "0"]
    command = [sys.executable, "-m", "router", *flags, "--disaggregate", "never"]
    router = await asyncio.create_subprocess_exec(
        *command, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    assert router.stdout is not None
    try:
        line = (await router.stdout.readline()).decode()
        assert line.startswith("router ready on "), line
        yield line.split()[3].rstrip(",:"), router.kill
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()


async def counted(
    store: Store, enough: Callable[[StoreCounters], bool], seconds: float = 30
) -> StoreCounters:
    """The store's counters as soon as they are enough."""
    async with asyncio.timeout(seconds):
        while True:
            counters = (await asyncio.to_thread(store.stats, TIMEOUT)).counters
            if enough(counters):
                return counters
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.cluster
async def test_two_routers_hint_at_one_store_and_one_of_them_is_killed(
    url: str, store: Store
) -> None:
    """Both keep the blocks of the prompt that waits in them; what the dead one said ends by itself.

    The prompt that waits in both is kept by the other one alone.
    """
    calls: list[Call] = []
    workers = [decode_worker(boot, max_num_seqs=1) for boot in ("d0", "d1")]
    waiting = [list(prompt(first).token_ids.ids) for first in (13, 23)]
    both = list(prompt(3).token_ids.ids)
    for worker in workers:
        worker.behaviour.step = asyncio.Semaphore(0)
        await worker.start()
    try:
        async with (
            process(workers[0], url) as (first, kill),
            process(workers[1], url) as (
                second,
                _,
            ),
        ):
            channels = [open_channel(address) for address in (first, second)]
            for tokens in (*waiting, both):
                await asyncio.to_thread(put, store, *blocks_of(tokens))
            for number, channel in enumerate(channels, 1):
                stub = router_pb2_grpc.RouterServiceStub(channel)
                heads = (10 * number + 1, 10 * number + 2, 10 * number + 3, 3)
                calls += [stub.Generate(prompt(head), timeout=60) for head in heads]
                told = (await asyncio.to_thread(store.stats, TIMEOUT)).counters.hints_received + 4
                await counted(store, lambda seen, told=told: seen.hints_received >= told)  # type: ignore[misc]
            await asyncio.to_thread(press, store)
            left = [await asyncio.to_thread(found, store, one) for one in (*waiting, both)]
            assert left == [4, 4, 4]
            kill()
            await counted(store, lambda seen: seen.hints_expired >= 1)
            before = (await asyncio.to_thread(store.stats, TIMEOUT)).counters.hints_received
            await counted(store, lambda seen: seen.hints_received >= before + 4)  # it goes on
            await asyncio.to_thread(press, store)
            left = [await asyncio.to_thread(found, store, one) for one in (*waiting, both)]
            assert left == [0, 4, 4]
            for call in calls:
                call.cancel()
            for channel in channels:
                await channel.close()
    finally:
        for worker in workers:
            await worker.stop()
