"""The client library against a router and fake workers."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from kvrelay import AsyncClient, Client
from kvrelay.client.aio import AsyncStream
from kvrelay.client.chunk import Chunk, Completion, completion_of
from kvrelay.client.client import Stream
from kvrelay.client.liveness import Liveness
from kvrelay.client.parameters import Parameters
from kvrelay.errors import DeadlineExceeded, Mismatch, NotFound, Rejected, Unavailable
from kvrelay.sampling import Sampling
from kvrelay.usage import Usage
from kvrelay.v1 import router_pb2, types_pb2
from tests.router.fakes import (
    LENGTH,
    Behaviour,
    FakeWorker,
    answer,
    decode_worker,
    namespace,
    prefill_worker,
    running,
    text_of,
    tokenizer,
)

T = TypeVar("T")
PROMPT = [5, 6, 7]


async def in_thread(run: Callable[[], T]) -> T:
    """Synchronous code beside the router's event loop."""
    return await asyncio.to_thread(run)


async def test_pieces_and_completion() -> None:
    async with running([prefill_worker(), decode_worker()]) as router:

        def use() -> tuple[list[Chunk], str, int]:
            with Client(router.address) as client:
                chunks = list(client.generate(token_ids=PROMPT, max_tokens=5, seed=3))
                done = client.complete(prompt="The fox", max_tokens=4, temperature=0.0)
                assert len(client.workers()) == 2
                return chunks, done.text, done.usage.prompt_tokens

        chunks, text, prompt_tokens = await in_thread(use)
    tokens = answer(PROMPT, 5, 3)
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert "".join(chunk.text for chunk in chunks) == text_of(tokens)
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.seed for chunk in chunks} == {3}
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert prompt_tokens == len(tokenizer().encode("The fox"))
    assert text


async def test_asyncio() -> None:
    async with running([decode_worker()]) as router, AsyncClient(router.address) as client:
        async with client.generate(token_ids=PROMPT, max_tokens=5, seed=3) as stream:
            chunks = [chunk async for chunk in stream]
        done = await client.complete(token_ids=PROMPT, max_tokens=5, seed=3)
        assert completion_of(chunks).token_ids == done.token_ids == tuple(answer(PROMPT, 5, 3))
        turns: list[tuple[str, str] | dict[str, str]] = [
            ("user", "Hi"),
            {"role": "user", "content": "Hi"},
        ]
        assert (await client.complete(messages=turns, max_tokens=1)).usage.prompt_tokens > 2
        assert len(await client.workers()) == 1


def leave_by_close(client: Client) -> None:
    stream = client.generate(token_ids=PROMPT, max_tokens=100)
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_with(client: Client) -> None:
    with client.generate(token_ids=PROMPT, max_tokens=100) as stream:
        next(stream)


def leave_by_break(client: Client) -> None:
    for _ in client.generate(token_ids=PROMPT, max_tokens=100):
        break
    gc.collect()


def leave_by_closing_the_client(client: Client) -> None:
    next(client.generate(token_ids=PROMPT, max_tokens=100))
    client.close()


@pytest.mark.parametrize(
    "leave", [leave_by_close, leave_by_with, leave_by_break, leave_by_closing_the_client]
)
async def test_leaving_cancels(leave: Callable[[Client], None]) -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(2)))
    async with running([worker]) as router:

        def use() -> None:
            with Client(router.address) as client:
                leave(client)

        await in_thread(use)
        await asyncio.wait_for(worker.cancelled.wait(), 20)


@pytest.mark.parametrize("how", ["aclose", "break", "cancel"])
async def test_leaving_cancels_asyncio(how: str) -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(2)))
    async with running([worker]) as router, AsyncClient(router.address) as client:
        if how == "cancel":
            task = asyncio.ensure_future(client.complete(token_ids=PROMPT, max_tokens=100))
            await worker.entered.wait()
            task.cancel()
        else:
            stream = client.generate(token_ids=PROMPT, max_tokens=100)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
            else:
                del stream
                gc.collect()
        await asyncio.wait_for(worker.cancelled.wait(), 20)


async def test_resume_after_the_router_died() -> None:
    step = asyncio.Semaphore(4)
    worker = decode_worker(behaviour=Behaviour(step=step))
    async with running([worker]) as first, AsyncClient(first.address) as client:
        stream = client.generate(token_ids=PROMPT, max_tokens=10)
        got = [await anext(stream) for _ in range(4)]
        seed = got[0].seed
        async with running([FakeWorker(worker.role, "d1")]) as second:
            await stream.aclose()
            async with AsyncClient(second.address) as other:
                got += [chunk async for chunk in other.resume(stream)]
    tokens = answer(PROMPT, 10, seed)
    assert [token for chunk in got for token in chunk.token_ids] == tokens
    assert "".join(chunk.text for chunk in got) == text_of(tokens)
    assert {chunk.seed for chunk in got} == {seed}


class BreaksAfterItsEnd:
    """A call that brought the whole answer, and whose status was lost."""

    def __init__(self) -> None:
        self._left = [
            router_pb2.GenerateResponse(tokens=[types_pb2.Token(id=7)], text="a", seed=3),
            router_pb2.GenerateResponse(text="\ufffd", finish_reason=LENGTH),
        ]

    def __next__(self) -> router_pb2.GenerateResponse:
        if not self._left:
            raise grpc.RpcError
        return self._left.pop(0)

    def __aiter__(self) -> BreaksAfterItsEnd:
        return self

    async def __anext__(self) -> router_pb2.GenerateResponse:
        return next(self)

    def cancel(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def is_active(self) -> bool:
        return False


async def test_an_answer_is_whole_with_its_last_message() -> None:
    """Resumed after it, what was held back to the end would come a second time."""
    request = router_pb2.GenerateRequest(prompt="x", max_tokens=1)
    stream = Stream(request, BreaksAfterItsEnd(), Liveness())
    assert "".join(chunk.text for chunk in stream) == "a\ufffd"
    other = AsyncStream(request, BreaksAfterItsEnd(), Liveness())  # type: ignore[arg-type]
    assert "".join([chunk.text async for chunk in other]) == "a\ufffd"
    with Client("127.0.0.1:1") as client, pytest.raises(Rejected, match="has ended"):
        client.resume(stream)
    with pytest.raises(Rejected, match="has ended"):
        other.continued()


async def test_an_answer_is_not_gone_on_with_by_another_model() -> None:
    step = asyncio.Semaphore(4)
    async with running([decode_worker(behaviour=Behaviour(step=step))]) as first:
        async with AsyncClient(first.address) as client:
            stream = client.generate(token_ids=PROMPT, max_tokens=10)
            got = [await anext(stream) for _ in range(4)]
        newer = decode_worker("d1", namespace=namespace(revision="r2"))
        async with running([newer]) as second, AsyncClient(second.address) as other:
            with pytest.raises(Mismatch, match="'r/float32', and 'r2/float32'") as caught:
                await anext(other.resume(stream))
        assert caught.value.field == "weights"
        smaller = decode_worker("d2", namespace=namespace(block_size=2))
        async with running([smaller]) as third, AsyncClient(third.address) as other:
            got += [chunk async for chunk in other.resume(stream)]
    assert [t for chunk in got for t in chunk.token_ids] == answer(PROMPT, 10, got[0].seed)


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_resumed_answer_has_the_hits_of_its_first_call(samples: int) -> None:
    """The KV that the call before computed itself is no hit."""
    step = asyncio.Semaphore(4)
    first = decode_worker(behaviour=Behaviour(hits=2, step=step))
    async with running([first]) as router, AsyncClient(router.address) as client:
        stream = client.generate(token_ids=PROMPT, max_tokens=10, n=samples)
        for _ in range(4):
            await anext(stream)
    cached = decode_worker("d1", behaviour=Behaviour(hits=len(PROMPT)))
    async with running([cached]) as router, AsyncClient(router.address) as client:
        again = client.resume(stream)
        await anext(again)
        assert (await usage_of(client.resume(again))).cached_prompt_tokens == 2
        other = client.generate(token_ids=PROMPT, max_tokens=10)
        assert (await usage_of(other)).cached_prompt_tokens == len(PROMPT)


async def test_hits_are_not_known_if_the_first_call_had_told_nothing() -> None:
    """It may have computed the prompt itself."""
    step = asyncio.Semaphore(0)
    first = decode_worker(behaviour=Behaviour(step=step))
    async with running([first]) as router, AsyncClient(router.address) as client:
        stream = client.generate(token_ids=PROMPT, max_tokens=10)
        waits = asyncio.ensure_future(anext(stream))
        await first.entered.wait()
        again = client.resume(stream)
        first.behaviour.hits = len(PROMPT)
        for _ in range(20):
            step.release()
        assert (await usage_of(again)).cached_prompt_tokens is None
        waits.cancel()


async def usage_of(stream: AsyncStream) -> Usage:
    """The usage on the last chunk."""
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    return usage


async def test_an_answer_is_not_gone_on_with_from_other_tokens_of_its_prompt() -> None:
    """As a chat template makes that says what day it is, after midnight."""
    step = asyncio.Semaphore(4)
    async with (
        running([decode_worker(behaviour=Behaviour(step=step))]) as router,
        AsyncClient(router.address) as client,
    ):
        stream = client.generate(token_ids=PROMPT, max_tokens=10)
        await anext(stream)
        request = stream.continued()
        request.token_ids.ids[0] += 1
        with pytest.raises(Mismatch, match="other prompt tokens") as caught:
            await anext(client._start(request, None))
        assert caught.value.field == "prompt_hash"


async def test_errors_are_typed() -> None:
    worker = decode_worker(behaviour=Behaviour(step=asyncio.Semaphore(1)))
    async with running([worker]) as router:

        def use() -> None:
            with Client(router.address) as client:
                with pytest.raises(Rejected) as caught:
                    client.complete(prompt="x", top_p=2.0)
                assert caught.value.field == "top_p"
                with pytest.raises(NotFound):
                    client.complete(prompt="x", model="other")
                with pytest.raises(DeadlineExceeded, match="time") as late:
                    client.complete(prompt="x", timeout=0.3)
                assert "Deadline Exceeded" not in str(late.value)  # gRPC's words
                with pytest.raises(DeadlineExceeded):
                    client.complete(prompt="x", timeout=-1.0)

        await in_thread(use)
    with Client(router.address) as client, pytest.raises(Unavailable):
        client.complete(prompt="x")


REFUSED_BY_THE_ROUTER: list[tuple[dict[str, object], str]] = [
    ({"prompt": "x", "stop": ""}, "stop[0]"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "x", "sampling": Sampling(min_p=2.0)}, "min_p"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    ({"prompt": ""}, "prompt"),
    ({"token_ids": [1, 10**6]}, "token_ids[1]"),
    ({"token_ids": [1] * 1001}, "token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": [("user", "x")] * 5000}, "messages"),
    ({"messages": [("user", "x"), ("user", "x" * 5_000_000)]}, "messages[1].content"),
    ({"prompt": "x", "output_token_ids": [10**6], "seed": 1}, "output_token_ids[0]"),
]


@pytest.mark.parametrize(("given", "parameter"), REFUSED_BY_THE_ROUTER)
async def test_what_a_router_refuses_has_the_name_of_its_parameter(
    given: dict[str, object], parameter: str
) -> None:
    async with running([decode_worker()]) as router, AsyncClient(router.address) as client:
        complete: Callable[..., Awaitable[Completion]] = client.complete
        with pytest.raises(Rejected) as caught:
            await complete(**given)
    assert caught.value.field == parameter
    assert str(caught.value).startswith(f"{parameter}: ")


BAD: list[tuple[dict[str, object], str]] = [
    ({}, "prompt"),
    ({"prompt": "x", "token_ids": [1]}, "prompt"),
    ({"token_ids": [1, -1]}, "token_ids[1]"),
    ({"token_ids": [1, 2**32]}, "token_ids[1]"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x", "stop": ["a", "\ud800"]}, "stop[1]"),
    ({"prompt": "x", "output_token_ids": [-5]}, "output_token_ids[0]"),
    ({"prompt": "x", "stop_token_ids": [-5]}, "stop_token_ids[0]"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "max_tokens": 2**31}, "max_tokens"),
    ({"messages": [("user", "\ud800")]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
]


@pytest.mark.parametrize(("ask", "field"), BAD)
def test_what_cannot_be_sent(ask: dict[str, object], field: str) -> None:
    with pytest.raises(Rejected) as caught:
        Parameters(**ask).message()  # type: ignore[arg-type]
    assert caught.value.field == field


WRONG_TYPES: list[tuple[dict[str, object], str]] = [
    ({"prompt": 5}, "prompt: must be text (a str) that can be encoded as UTF-8, got 5"),
    ({"prompt": b"x"}, "prompt: must be text (a str) that can be encoded as UTF-8, got b'x'"),
    ({"prompt": [1, 2]}, "give token ids as token_ids, a conversation as messages"),
    ({"prompt": "x", "model": 5}, "model: must be text"),
    ({"prompt": "x", "temperature": "hot"}, "temperature: must be a number, got 'hot'"),
    ({"prompt": "x", "temperature": True}, "temperature: must be a number, got True"),
    ({"prompt": "x", "top_p": 10**400}, "top_p: must be a number, got 1000"),
    ({"prompt": "x", "top_k": 1.5}, "top_k: must be an integer from -2147483648 to 2147483647"),
    ({"prompt": "x", "seed": 2**64}, f"seed: must be an integer from 0 to {2**64 - 1}, got"),
    ({"prompt": "x", "max_tokens": "16"}, "max_tokens: must be an integer"),
    ({"prompt": "x", "ignore_eos": "yes"}, "ignore_eos: must be True or False, got 'yes'"),
    ({"prompt": "x", "stop": 5}, "stop: must be a list, each text"),
    ({"prompt": "x", "stop": [b"a"]}, "stop[0]: must be text (a str)"),
    ({"prompt": "x", "stop_token_ids": 5}, "stop_token_ids: must be a list, each an integer"),
    ({"token_ids": "abc"}, "got 'abc': give text as prompt"),
    ({"token_ids": [[1, 2]]}, "token_ids[0]: must be an integer from 0 to 4294967295, got [1, 2]"),
    ({"token_ids": [1.0]}, "token_ids[0]: must be an integer from 0 to 4294967295, got 1.0"),
    ({"messages": "Hi"}, "got 'Hi': give a single text as prompt"),
    ({"messages": ["Hi"]}, "messages[0]: must be a mapping with role and content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]: must be a mapping"),
    ({"messages": [("user", ["Hi"])]}, "messages[0].content: must be text (a str)"),
    ({"prompt": "x", "sampling": Sampling(top_k=1.5)}, "top_k: must be an integer"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("given", "told"), WRONG_TYPES)
def test_a_wrong_type_is_told_in_words_of_the_client(given: dict[str, object], told: str) -> None:
    make: Callable[..., Parameters] = Parameters
    with pytest.raises(Rejected) as caught:
        make(**given).message()
    assert told in str(caught.value)
    for words in ("bad argument type", "cannot be interpreted", "kvrelay.v1", "out of range"):
        assert words not in str(caught.value)


def test_nothing_is_sent_that_was_not_given() -> None:
    message = Parameters(prompt="x", temperature=0.0, top_k=None, stop="end").message()
    assert [field.name for field, _ in message.ListFields()] == ["prompt", "sampling"]
    assert message.sampling.HasField("temperature")
    assert not message.sampling.HasField("top_k")
    assert list(message.sampling.stop) == ["end"]
    with pytest.raises(TypeError, match="tempature"):
        Parameters(prompt="x", tempature=1)  # type: ignore[call-arg]


def test_the_import_is_light() -> None:
    program = "import sys; from kvrelay import Client; sys.exit('torch' in sys.modules)"
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
