"""Several answers to one request: by index, resumed by index, one answer as before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvrelay import AsyncClient, Chunk, Client
from kvrelay.client.chunk import ResumeState, completion_of
from kvrelay.errors import Rejected, Unavailable
from kvrelay.v1 import router_pb2, types_pb2
from tests.router.fakes import (
    LENGTH,
    answer,
    decode_worker,
    prefill_worker,
    running,
    text_of,
)

PROMPT = [5, 6, 7]


async def test_choices_by_index() -> None:
    async with (
        running([prefill_worker(), decode_worker()]) as router,
        AsyncClient(router.address) as client,
    ):
        done = await client.complete(token_ids=PROMPT, max_tokens=6, seed=9, n=4)
        one = await client.complete(token_ids=PROMPT, max_tokens=6, seed=9)
        singles = [
            await client.complete(token_ids=PROMPT, max_tokens=6, seed=9 + index)
            for index in range(4)
        ]

        def in_a_thread() -> None:
            with Client(router.address) as blocking:
                again = blocking.complete(token_ids=PROMPT, max_tokens=6, seed=9, n=4)
                assert again.choices == done.choices

        await asyncio.to_thread(in_a_thread)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    for choice, single in zip(done.choices, singles, strict=True):
        assert choice.token_ids == single.token_ids == tuple(answer(PROMPT, 6, choice.seed))
        assert choice.text == single.text == text_of(choice.token_ids)
        assert (choice.seed, choice.finish_reason) == (single.seed, single.finish_reason)
    assert (done.text, done.token_ids, done.seed) == (one.text, one.token_ids, one.seed)
    assert done.usage.completion_tokens == 24
    assert {leg.sample for leg in done.usage.legs} == {0, 1, 2, 3}
    assert len(one.choices) == 1
    assert one.choices[0].token_ids == one.token_ids


async def test_a_broken_stream_of_several_answers_is_resumed() -> None:
    """Twice: what the first stream received is part of what the second one sends."""
    async with (
        running([prefill_worker(), decode_worker()]) as router,
        AsyncClient(router.address) as client,
    ):
        stream = client.generate(token_ids=PROMPT, max_tokens=8, seed=3, n=3)
        chunks = [await anext(stream) for _ in range(6)]
        second = client.resume(stream)
        chunks += [await anext(second) for _ in range(3)]
        third = client.resume(second)
        chunks += [chunk async for chunk in third]
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == answer(PROMPT, 8, 3 + index)
        assert "".join(chunk.text for chunk in own) == text_of(answer(PROMPT, 8, 3 + index))
        assert {chunk.seed for chunk in own} == {3 + index}
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["length"]
    assert len({chunk.request_id for chunk in chunks}) == 3


def message(
    index: int, *tokens: int, seed: int | None = None, last: bool = False
) -> router_pb2.GenerateResponse:
    made = router_pb2.GenerateResponse(
        index=index, tokens=[types_pb2.Token(id=token) for token in tokens]
    )
    if seed is not None:
        made.seed = seed
        made.weights = "w"
    if last:
        made.finish_reason = LENGTH
    return made


def sent(request: router_pb2.GenerateRequest) -> list[tuple[Sequence[int], bool]]:
    return [(list(sample.token_ids), sample.ended) for sample in request.samples]


def test_what_is_sent_to_resume() -> None:
    state = ResumeState(router_pb2.GenerateRequest(n=3))
    assert sent(state.continued()) == [([], False)] * 3
    state.take(message(1, 8, seed=0))
    state.take(message(0, 4, seed=(1 << 64) - 1))
    state.take(message(1, 9, last=True))
    again = state.continued()
    assert sent(again) == [([4], False), ([8, 9], True), ([], False)]
    assert (again.sampling.seed, again.weights) == ((1 << 64) - 1, "w")
    state = ResumeState(again)
    state.take(message(2, 7, seed=1))
    assert not state.ended
    assert sent(state.continued()) == [([4], False), ([8, 9], True), ([7], False)]
    state.take(message(2, last=True))
    state.take(message(0, last=True))
    assert state.ended
    with pytest.raises(Rejected, match="nothing to resume"):
        state.continued()


def test_a_router_that_sends_another_index_is_not_believed() -> None:
    state = ResumeState(router_pb2.GenerateRequest())
    with pytest.raises(Unavailable, match="answer 1 of 1"):
        state.take(message(1, 5))


def test_a_stream_that_ends_before_one_of_its_answers() -> None:
    state = ResumeState(router_pb2.GenerateRequest(n=2))
    chunks: list[Chunk] = [
        state.take(message(0, 5, seed=1)),
        state.take(message(1, 6, seed=2, last=True)),
    ]
    with pytest.raises(Unavailable, match="ended before the answer did"):
        completion_of(chunks)
    last = message(1, last=True)
    last.usage.prompt_tokens = 1
    with pytest.raises(Unavailable, match="ended before answer 0 did"):
        completion_of([*chunks, state.take(last)])
