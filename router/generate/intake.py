"""Intake: turns a request message into a generation, or refuses it, before it queues."""

from __future__ import annotations

import time

from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import router_pb2
from router.generate.generation import Generation, SharedParts
from router.generate.request import build, check_length
from router.placement.placer import namespace_of
from router.queue.prompts import PromptTokenizer
from router.queue.quotas import QuotaHold


class Intake:
    """Tokenizes, checks the request against what the fleet serves, and charges its tenant."""

    def __init__(self, prompts: PromptTokenizer, parts: SharedParts) -> None:
        self._prompts = prompts
        self._parts = parts

    async def accept(
        self, message: router_pb2.GenerateRequest, deadline: Deadline, hold: QuotaHold
    ) -> Generation:
        """The generation of a request. Raises ``KvrelayError`` if the request is refused."""
        received_at = time.monotonic()
        tenant, placer = hold.tenant, self._parts.placer
        async with deadline.limit("to tokenize the prompt"):
            prompt = await self._prompts.tokenize(message, tenant)
        info = await placer.info(deadline)
        check_length(message, info.max_model_len)
        request = build(message, prompt, info, deadline, tenant, received_at)
        placer.check_fits(request.positions)
        hold.charge(request.charged_tokens)
        namespace = namespace_of(info, tenant)
        digest = namespace.digest if tenant.salt else info.namespace.digest
        return Generation(request, placer.prefix(prompt, namespace), digest, self._parts)
