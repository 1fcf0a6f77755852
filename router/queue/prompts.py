"""The token ids of a request's input. Long inputs are tokenized in threads, not on the event loop.

This happens before the queue, and it takes much memory: so the text under way is bounded over all
tenants, and a text that cannot fit into the model's positions is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.errors import Rejected
from kvrelay.rpc.protocol import check_ids
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.tool_messages import options_of, turns_of
from kvrelay.sampling import check_bad_words
from kvrelay.text.bad_words import bad_word_ids
from kvrelay.text.tokenizer import NoTokenizer, TextTooLong, Tokenizer
from kvrelay.tools import FIELD
from kvrelay.v1 import router_pb2
from router.queue.quotas import QuotaHold
from router.queue.semaphore import FairSemaphore

LONG_TEXT = 2048  # bytes: from here on tokenizing takes too long for the event loop
LONG_CHAT = 32  # messages
MANY_TOKENS = 4096  # decoding more takes milliseconds
THREADS = max(4, os.cpu_count() or 1)

T = TypeVar("T")


class TextThreads:
    """Threads for long texts, of ``limit`` bytes at once; half of that for one tenant.

    A text counts until its thread is done, also if its client leaves.
    """

    def __init__(self, limit: int) -> None:
        self.semaphore = FairSemaphore(limit, limit // 2)
        self._least = limit // THREADS

    async def run(self, tenant: Tenant, size: int, work: Callable[[], T]) -> T:
        """The result of ``work`` on ``size`` bytes; ``Exhausted`` if the request is evicted."""
        units = max(size, self._least)
        await self.semaphore.acquire(tenant, units)
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda done: self._finished(tenant, units, done))
        try:
            return await asyncio.shield(running)
        finally:
            del running  # an error that it raised has this frame

    def _finished(self, tenant: Tenant, units: int, done: asyncio.Future[T]) -> None:
        self.semaphore.release(tenant, units)
        if not done.cancelled():
            done.exception()  # retrieved, also if no request waits for it any more


class PromptTokenizer:
    """The tokenizer of a router, shared by all tenants."""

    def __init__(self, tokenizer: Tokenizer, max_prompt: int) -> None:
        self._tokenizer = tokenizer
        self.threads = TextThreads(max_prompt)

    async def tokenize(
        self, message: router_pb2.GenerateRequest, hold: QuotaHold, positions: int
    ) -> tuple[int, ...]:
        """The ids. ``hold`` is told how many a text has: ``positions`` if it cannot fit into them.

        ``Rejected`` for a text that is too long or that no template takes; ``Exhausted`` if the
        request was evicted while it waited for a thread.
        """
        if message.HasField("token_ids"):
            return tuple(message.token_ids.ids)
        tokenizer, chat = self._tokenizer, message.HasField("chat")
        try:
            text = await self._rendered(message, hold.tenant) if chat else message.prompt
            size = tokenizer.check_size(text, _longest_field(message), positions)
        except TextTooLong:
            hold.tokenized(positions)
            raise
        ids = await self._run(
            hold.tenant,
            size,
            size > LONG_TEXT,
            lambda: tokenizer.encode(text, add_special_tokens=not chat),
        )
        hold.tokenized(len(ids))
        return tuple(ids)

    async def _rendered(self, message: router_pb2.GenerateRequest, tenant: Tenant) -> str:
        chat = message.chat
        size = chat.ByteSize()
        long = size > LONG_TEXT or len(chat.messages) > LONG_CHAT
        return await self._run(tenant, size, long, lambda: self._render(chat))

    def _render(self, chat: router_pb2.Chat) -> str:
        tools = options_of(chat).for_template()
        return self._tokenizer.render(turns_of(chat), chat.template_kwargs, tools)

    async def decode(self, tokens: Sequence[int], hold: QuotaHold) -> str:
        """The text of ``tokens``, special ones included; ``hold`` is told how many they are."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, NoTokenizer):
            raise Rejected("tokens", "this model has no tokenizer")
        hold.tokenized(len(tokens))
        check_ids("tokens", tokens, tokenizer.vocab_size)
        return await self._run(
            hold.tenant,
            len(tokens),
            len(tokens) > MANY_TOKENS,
            lambda: tokenizer.backend.decode(list(tokens), skip_special_tokens=False),
        )

    async def names(self, tokens: Sequence[int], tenant: Tenant) -> list[str | None]:
        """The name of each token in the vocabulary."""
        backend = self._tokenizer.backend
        return await self._run(
            tenant,
            len(tokens),
            len(tokens) > MANY_TOKENS,
            lambda: [backend.id_to_token(token) for token in tokens],
        )

    async def bad_words(self, words: Sequence[str], tenant: Tenant) -> list[list[int]]:
        """The token sequences of bad words; ``Rejected`` for words that cannot be used."""
        if not words:
            return []
        check_bad_words(words)
        size = sum(map(len, words))
        long = size > LONG_TEXT
        return await self._run(tenant, size, long, lambda: bad_word_ids(self._tokenizer, words))

    async def _run(self, tenant: Tenant, size: int, long: bool, work: Callable[[], T]) -> T:
        return await self.threads.run(tenant, size, work) if long else work()


def _longest_field(message: router_pb2.GenerateRequest) -> str:
    """The field that makes most of a prompt's text."""
    if not message.HasField("chat"):
        return "prompt"
    tools = sum(tool.ByteSize() for tool in message.chat.tools)
    return FIELD if tools > message.chat.ByteSize() - tools else "chat"
