"""Long inputs are tokenized off the event loop, a bounded amount at once, some of each tenant."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

import pytest

from kvrelay.errors import Rejected
from kvrelay.rpc.security.identity import Tenant
from kvrelay.text.tokenizer import TextTooLong, Tokenizer
from kvrelay.v1 import router_pb2
from router.queue.prompts import LONG_CHAT, LONG_TEXT, PromptTokenizer
from router.queue.quotas import QuotaHold, Quotas

SECONDS = 20
POSITIONS = 1000
MAX_PROMPT = 4 * (LONG_TEXT + 1)  # four long texts at once, two of one tenant


class Slow:
    """A tokenizer that waits for a permit; ``threads`` have called it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.inside = threading.Semaphore(0)
        self.on = threading.Semaphore(0)

    def check_size(self, text: str, field: str, positions: int) -> int:
        if "long" in text:
            raise TextTooLong(field, f"more than {positions} tokens")
        return len(text)

    def render(
        self, turns: list[dict[str, object]], arguments: str, tools: list[dict[str, object]]
    ) -> str:
        self.threads.append(threading.current_thread())
        return "short"

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        self.threads.append(threading.current_thread())
        return [[len(text.strip())] for text in texts]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == "short":
            return [int(add_special_tokens)]
        self.threads.append(threading.current_thread())
        if len(text) > LONG_TEXT:
            self.inside.release()
            assert self.on.acquire(timeout=SECONDS)
        if "bad" in text:
            raise Rejected("prompt", "bad")
        return [len(text)]

    async def entered(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.inside.acquire, timeout=SECONDS)


def hold(tenant: str = "") -> QuotaHold:
    return QuotaHold(Tenant(tenant), Quotas(lambda: 0.0))


class Prompts:
    """A ``PromptTokenizer`` with a slow tokenizer."""

    def __init__(self, slow: Slow) -> None:
        self._prompts = PromptTokenizer(cast("Tokenizer", slow), MAX_PROMPT)

    async def ids(self, message: router_pb2.GenerateRequest, tenant: str = "") -> tuple[int, ...]:
        return await self._prompts.tokenize(message, hold(tenant), POSITIONS)


def text(extra: str = "") -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(prompt=("x" * (LONG_TEXT + 1) + extra)[-LONG_TEXT - 1 :])


def chat(count: int, role: str, content: str) -> router_pb2.GenerateRequest:
    turns = [router_pb2.ChatMessage(role=role, content=content)] * count
    return router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=turns))


@pytest.mark.parametrize(
    ("request_", "apart"),
    [
        (chat(1, "user", "hello"), False),
        (chat(1, "r" * LONG_TEXT, "hello"), True),
        (chat(1, "user", "c" * LONG_TEXT), True),
        (chat(LONG_CHAT + 1, "", ""), True),
    ],
)
async def test_a_long_chat_is_not_for_the_event_loop(
    request_: router_pb2.GenerateRequest, apart: bool
) -> None:
    slow = Slow()
    assert await Prompts(slow).ids(request_) == (0,)  # the template adds the special tokens
    assert (slow.threads[0] is not threading.main_thread()) is apart


async def test_many_bad_words_are_not_for_the_event_loop() -> None:
    for length, apart in ((20, False), (200, True)):
        slow = Slow()
        prompts = PromptTokenizer(cast("Tokenizer", slow), MAX_PROMPT)
        sequences = await prompts.bad_words(["w" * length] * 100, Tenant())
        assert sequences == [[length]] * 100
        assert (slow.threads[0] is not threading.main_thread()) is apart
    assert await PromptTokenizer(cast("Tokenizer", slow), MAX_PROMPT).bad_words([], Tenant()) == []


async def test_long_prompts_of_one_tenant_leave_room_for_another() -> None:
    slow = Slow()
    made = Prompts(slow)
    greedy = [asyncio.ensure_future(made.ids(text(), "greedy")) for _ in range(10)]
    await slow.entered(2)
    for task in greedy[:2]:  # a client that leaves does not free its share
        task.cancel()
    other = asyncio.ensure_future(made.ids(text("other"), "small"))
    await slow.entered(1)
    assert len(slow.threads) == 2 + 1
    assert await made.ids(router_pb2.GenerateRequest(prompt="tiny"), "greedy") == (4,)
    for _ in range(20):
        slow.on.release()
    assert await other == (LONG_TEXT + 1,)
    results = await asyncio.gather(*greedy, return_exceptions=True)
    done = [result for result in results if not isinstance(result, BaseException)]
    assert done == [(LONG_TEXT + 1,)] * 8


async def test_tokenizing_is_bounded_over_all_tenants() -> None:
    """Its memory is: ten tenants have as many bytes of text under way as one has."""
    slow = Slow()
    made = Prompts(slow)
    tasks = [asyncio.ensure_future(made.ids(text(), f"tenant {n}")) for n in range(10)]
    await slow.entered(4)
    await asyncio.sleep(0.05)  # no fifth one begins
    assert len(slow.threads) == 4
    for _ in range(10):
        slow.on.release()
    assert await asyncio.gather(*tasks) == [(LONG_TEXT + 1,)] * 10


async def test_a_rejected_prompt_gives_its_share_back() -> None:
    slow = Slow()
    made = Prompts(slow)
    for _ in range(6):
        slow.on.release()
        with pytest.raises(Rejected):
            await asyncio.wait_for(made.ids(text("bad")), SECONDS)


async def test_the_tokens_of_a_text_are_noted_for_its_tenant() -> None:
    slow, noted = Slow(), hold()
    slow.on.release()
    prompts = PromptTokenizer(cast("Tokenizer", slow), MAX_PROMPT)
    await prompts.tokenize(router_pb2.GenerateRequest(prompt="short"), noted, POSITIONS)
    assert noted.text == 1
    noted = hold()
    with pytest.raises(TextTooLong):
        await prompts.tokenize(text("long"), noted, POSITIONS)
    assert noted.text == POSITIONS  # not tokenized: it has more
    assert not slow.threads
