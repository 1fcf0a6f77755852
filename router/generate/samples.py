"""The samples of one request: generations that share a prompt, as one stream of responses.

One sample computes the prompt as a single request does. The others have a slot of their own, and
begin when the blocks of the prompt can be found. A failure of one sample ends the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from kvrelay.v1 import router_pb2, types_pb2
from router.generate.generation import Generation
from router.generate.request import AcceptedRequest, split
from router.generate.shared import SharedParts, SharedPrompt
from router.generate.usage import samples_usage
from router.placement.placer import StreamBinding
from router.queue.gate import QueueGate
from router.queue.quotas import QuotaHold


class Samples:
    """All samples of a request; usually one. ``hold`` is told the tokens that they use."""

    def __init__(
        self, request: AcceptedRequest, bound: StreamBinding, parts: SharedParts, hold: QuotaHold
    ) -> None:
        self.request = request
        self.bound = bound
        self._hold = hold
        each = split(request) if request.samples else [request]
        self._prompt = SharedPrompt(each[0].sample, bound) if request.samples else None
        self._generations = [Generation(one, bound, parts, self._prompt) for one in each]

    @property
    def places(self) -> int:
        """Samples to be made: each counts as a request."""
        return len(self._generations)

    @property
    def charged_tokens(self) -> int:
        """Tokens charged to the tenant: the prompt once, and every output that has not ended."""
        outputs = sum(one.request.max_tokens for one in self._generations)
        return len(self.request.prompt) + outputs

    @property
    def _given(self) -> int:
        """Tokens of the prompt and the outputs so far."""
        return len(self.request.prompt) + sum(one.so_far for one in self._generations)

    @property
    def resumed(self) -> bool:
        """Whether the client has tokens of the request."""
        request = self.request
        return bool(request.outputs) or any(sample.outputs for sample in request.samples)

    def responses(self, gate: QueueGate) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses of all samples; closing the stream cancels all their legs."""
        return (
            self._merged(gate) if self.request.samples else self._sample(self._generations[0], gate)
        )

    async def _sample(
        self, generation: Generation, gate: QueueGate
    ) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses of one sample, from its place in the queue on."""
        request, prompt = generation.request, self._prompt
        leads = prompt is None or prompt.leader == request.sample
        passed = gate.passed(
            request.positions if leads else request.max_tokens,
            request.priority,
            request.tenant,
            request.deadline,
            request.part,
            patient=not leads,
        )
        async with passed as slot, aclosing(generation.responses(slot)) as responses:
            now = time.monotonic()
            request.span.record("queue", now - slot.waited, now)
            await generation.replay()
            if leads:
                self._hold.used = max(self._hold.used, self._given)  # if refused earlier: nothing
            elif prompt is not None:
                await prompt.computed.wait()  # the leader's end, if it fails, cancels this task
            async for response in responses:
                yield response

    async def _merged(self, gate: QueueGate) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses of all samples as they come, the usage of all on the last one."""
        queue = asyncio.Queue[router_pb2.GenerateResponse | Exception](len(self._generations))

        async def feed(generation: Generation) -> None:
            try:
                async with aclosing(self._sample(generation, gate)) as responses:
                    async for response in responses:
                        await queue.put(response)
            except Exception as error:  # noqa: BLE001 - raised where the queue is read
                await queue.put(error)

        tasks = [asyncio.create_task(feed(generation)) for generation in self._generations]
        usages: dict[int, types_pb2.Usage] = {}
        try:
            while len(usages) < len(tasks):
                response = await queue.get()
                if isinstance(response, Exception):
                    raise response
                if response.finish_reason:
                    usages[response.index] = types_pb2.Usage()
                    usages[response.index].CopyFrom(response.usage)
                    response.ClearField("usage")
                if len(usages) == len(tasks):
                    response.usage.CopyFrom(self._usage(usages))
                yield response
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _usage(self, usages: Mapping[int, types_pb2.Usage]) -> types_pb2.Usage:
        ended = [sample for sample in self.request.samples if sample.ended]
        tokens = sum(len(sample.outputs) for sample in ended)
        return samples_usage(usages, self._generations[0].request.sample, tokens)
