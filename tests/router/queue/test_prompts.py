"""Long inputs are tokenized off the event loop, a few of each tenant at once."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest

from kvrelay.errors import Exhausted, Rejected
from kvrelay.rpc.security.identity import Tenant
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.queue.prompts import LONG_CHARS, LONG_CHAT, SLOTS, PromptTokenizer, TokenizeSlots

SECONDS = 20


class Slow:
    """A tokenizer that waits for a permit; ``threads`` are those that called it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.inside = threading.Semaphore(0)
        self.on = threading.Semaphore(0)

    def check_size(self, text: str, field: str) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        if len(text) > LONG_CHARS:
            self.inside.release()
            assert self.on.acquire(timeout=SECONDS)
        if "bad" in text:
            raise Rejected("prompt", "bad")
        return [len(text)]

    def encode_chat(self, turns: list[dict[str, str]]) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(turns)]

    async def entered(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.inside.acquire, timeout=SECONDS)


def prompts(slow: Slow) -> PromptTokenizer:
    return PromptTokenizer(cast("Tokenizer", slow))


def text(extra: str = "") -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(prompt="x" * LONG_CHARS + "y" + extra)


def chat(count: int, role: str, content: str) -> router_pb2.GenerateRequest:
    turns = [router_pb2.ChatMessage(role=role, content=content)] * count
    return router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=turns))


@pytest.mark.parametrize(
    ("request_", "apart"),
    [
        (chat(1, "user", "hello"), False),
        (chat(1, "r" * LONG_CHARS, "hello"), True),
        (chat(1, "user", "c" * LONG_CHARS), True),
        (chat(LONG_CHAT + 1, "", ""), True),
    ],
)
async def test_a_long_chat_is_not_for_the_event_loop(
    request_: router_pb2.GenerateRequest, apart: bool
) -> None:
    slow = Slow()
    assert await prompts(slow).tokenize(request_, Tenant()) == (len(request_.chat.messages),)
    assert (slow.threads[0] is not threading.main_thread()) is apart


async def test_one_tenants_long_prompts_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.queue.prompts.SLOTS", 2)  # the pool has few threads on few cores
    slow = Slow()
    made = prompts(slow)
    greedy = [asyncio.ensure_future(made.tokenize(text(), Tenant("greedy"))) for _ in range(10)]
    await slow.entered(2)
    for task in greedy[:2]:  # a client that leaves does not free its slot
        task.cancel()
    other = asyncio.ensure_future(made.tokenize(text("other"), Tenant("small")))
    await slow.entered(1)
    assert len(slow.threads) == 2 + 1
    assert await made.tokenize(router_pb2.GenerateRequest(prompt="short"), Tenant("greedy")) == (5,)
    for _ in range(20):
        slow.on.release()
    assert await other == (LONG_CHARS + 6,)
    got = await asyncio.gather(*greedy, return_exceptions=True)
    assert [one for one in got if not isinstance(one, BaseException)] == [(LONG_CHARS + 1,)] * 8


async def test_what_is_wrong_is_told_and_gives_its_place_back() -> None:
    slow = Slow()
    made = prompts(slow)
    for _ in range(SLOTS + 2):
        slow.on.release()
        with pytest.raises(Rejected):
            await asyncio.wait_for(made.tokenize(text("bad"), Tenant()), SECONDS)


async def test_the_last_of_whoever_has_most_waiting_makes_room() -> None:
    slots, left = TokenizeSlots(1), Exhausted("pushed out", 1.0)
    many, heavy, other = Tenant("many"), Tenant("heavy", weight=4.0), Tenant("other")
    waiting = [asyncio.ensure_future(slots.acquire(who)) for who in (many, heavy) for _ in range(6)]
    await asyncio.sleep(0)
    assert slots.max_load == 5
    assert not slots.evict_for(many, lambda _: left)  # it has most itself
    assert slots.evict_for(heavy, lambda _: left)
    assert slots.evict_for(other, lambda _: left)
    with pytest.raises(Exhausted):
        await waiting[4]
    assert [n for n, task in enumerate(waiting) if task.done()] == [0, 4, 5, 6]
    assert not slots.evict_for(Tenant("light", weight=0.1), lambda _: left)
    slots.release(many)
    for task in waiting:
        task.cancel()  # the task that was just given a slot releases it
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(slots.acquire(many), SECONDS)
    assert slots.max_load == 0
