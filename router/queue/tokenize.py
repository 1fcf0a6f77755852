"""The token ids of a request's input: what takes long is done beside the event loop.

It is work before any queue, so each tenant may have a little of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.rpc.security.identity import Tenant
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.queue.tokenize_slots import TokenizeSlots

LONG_CHARS = 2048  # from here on tokenising takes too long for the event loop
LONG_CHAT = 32  # messages
AT_ONCE = 4  # long ones of a tenant


class PromptTokenizer:
    """The tokenizer of a router, shared by all tenants."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.turns = TokenizeSlots(AT_ONCE)

    async def of(self, message: router_pb2.GenerateRequest, tenant: Tenant) -> tuple[int, ...]:
        """The ids; ``Rejected`` for an input that is too long or that no template takes.

        ``Exhausted`` for who was pushed out while it waited.
        """
        if message.HasField("token_ids"):
            return tuple(message.token_ids.ids)
        if message.HasField("chat"):
            turns = [{"role": m.role, "content": m.content} for m in message.chat.messages]
            chars = sum(len(turn["role"]) + len(turn["content"]) for turn in turns)
            long = chars > LONG_CHARS or len(turns) > LONG_CHAT
            return await self._ids(lambda: self._tokenizer.encode_chat(turns), long, tenant)
        prompt = message.prompt
        self._tokenizer.check_size(prompt, "prompt")
        long = len(prompt) > LONG_CHARS
        return await self._ids(lambda: self._tokenizer.encode(prompt), long, tenant)

    async def _ids(
        self, encode: Callable[[], Sequence[int]], long: bool, tenant: Tenant
    ) -> tuple[int, ...]:
        if not long:
            return tuple(encode())
        return tuple(await self.turns.beside(tenant, encode))
