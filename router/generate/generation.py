"""One running request: while it is not finished, choose a worker and run a leg there.

Every leg has the same shape (prompt, tokens so far, sampling), so a prefill leg, the decode leg
after it, and one more after a worker died are the same loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvrelay.errors import KvrelayError, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.rpc.protocol import ending_of
from kvrelay.text.output import OutputText
from kvrelay.v1 import router_pb2, types_pb2
from router.generate.calls import AnswerReader
from router.generate.legs import UNFINISHED, LegEvent, LegOrder, refused, run_leg
from router.generate.request import AcceptedRequest
from router.generate.retry import Attempts, FailedLeg, PoisonRequest
from router.generate.shared import SharedParts, SharedPrompt
from router.generate.usage import begun_of, hit_of, lost_leg, request_usage
from router.placement.placer import NextLeg, Placed, StreamBinding
from router.queue.gate import Slot

log = logging.getLogger("kvrelay.router")
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
MANY_TOKENS = 4096  # decoding more takes milliseconds: not on the event loop
BYTES_PER_TOKEN = 4  # of usual text
SETTLE_LOOK_SECONDS = 0.2  # between two looks at silent workers


class Generation:
    """Owns the output tokens of a request, their text, and the usage of its legs.

    ``shared``: of a request for several samples, of which this generation makes one.
    """

    def __init__(
        self,
        request: AcceptedRequest,
        bound: StreamBinding,
        parts: SharedParts,
        shared: SharedPrompt | None = None,
    ) -> None:
        self.request = request
        self._trials = None if shared is None else shared.trials
        leads = shared is not None and shared.leader == request.sample
        self._leads = shared if leads else None
        self._follows = None if leads else shared
        self._bound = bound
        self._profile = ""  # of the worker of the last leg
        self._parts = parts
        sampling = request.sampling
        self._ending = ending_of(sampling, parts.eos_token_ids)
        self._text = OutputText(parts.tokenizer, sampling.stop, sampling.min_tokens)
        self._reader = AnswerReader(request)
        self._outputs = list(request.outputs)
        self._usages: list[types_pb2.LegUsage] = []
        self._attempts = Attempts()
        if shared is not None:
            self._attempts.left = shared.trials.left
        self._handoff = types_pb2.Handoff()  # of the previous leg
        self._admitted: types_pb2.LegUsage | None = None  # account of the current leg, so far
        self._finish: types_pb2.FinishReason.ValueType = UNFINISHED
        self._stopped = False  # by a stop string
        self._first_token_seconds: float | None = None  # None until the first response
        self._waited = 0.0  # seconds in the router's queue
        self._id = secrets.randbits(64)  # a handoff is bound to it and to the leg's number
        self._legs = 0
        self._unheard = False  # the first leg may have saved blocks, and was lost before admission

    @property
    def so_far(self) -> int:
        """Number of output tokens."""
        return len(self._outputs)

    async def replay(self) -> None:
        """Decode the tokens so far. Takes milliseconds: only for a running request."""
        if self.so_far <= MANY_TOKENS:
            self.replay_tokens()
            return
        async with self.request.deadline.limit("to make text of the output so far"):
            size = BYTES_PER_TOKEN * self.so_far
            await self._parts.threads.run(self.request.tenant, size, self.replay_tokens)

    def replay_tokens(self) -> None:
        """Decode the tokens so far here; raises ``Rejected`` if one before the last ends them."""
        last = len(self._outputs) - 1
        for index, token in enumerate(self._outputs):
            ends = self._ending.ends(index, token)
            delta = self._text.push(token, ends)
            self._reader.replay(delta.text)
            self._stopped = delta.stopped
            if self._stopped or ends:
                self._finish = STOP
                if index < last:
                    raise Rejected(
                        f"{self.request.outputs_field}[{index + 1}]",
                        "the output had ended before this token",
                    )
        if self._finish == UNFINISHED and last + 1 >= self.request.max_tokens:
            self._finish = LENGTH

    async def responses(self, slot: Slot) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses of a request in a slot; closing the stream cancels the current leg."""
        self._waited = slot.waited
        if self._follows is not None:
            self._bound = self._follows.bound
        self._parts.retry.poisons.check(self.request, time.monotonic())
        while self._finish == UNFINISHED:
            with self.request.span.child("placement"):
                placed = await self._place()
            before = self.so_far
            try:
                async with aclosing(self._leg(placed)) as responses:
                    async for response in responses:
                        yield response
            except KvrelayError as error:
                slot.moved |= isinstance(error, Unavailable)
                self._unheard |= not refused(error) and not begun_of(self._usages)
                await self._retry(placed, error, self.so_far - before)
            finally:
                if self._trials is not None:
                    self._trials.end(placed.key)
        if self._leads is not None:
            self._leads.note(self._bound, "")  # the output was complete without a leg's end
        yield self._last_response()

    async def _place(self) -> Placed:
        """A worker for the next leg; samples wait for one on which the request may run."""
        placer, registry, deadline = self._parts.placer, self._parts.registry, self.request.deadline
        while True:
            leg = self._next_leg()
            if leg.among is None or placer.can_place(leg):
                placed = await placer.place(leg)
                self._recount_deaths()  # a worker may have been found dead since
                if self._trials is None:
                    return placed
                if (among := self._among()) is None or placed.key in among:
                    self._trials.begin(placed.key)
                    return placed
            else:
                await registry.wait_for(lambda: False, deadline.earlier(SETTLE_LOOK_SECONDS))
                self._recount_deaths()
                deadline.check("to find a worker")

    def _among(self) -> frozenset[str] | None:
        """The workers on which the next leg may begin; ``None``: any."""
        if self._trials is None:
            return None
        registry, now = self._parts.registry, time.monotonic()
        return self._trials.among(
            self._parts.retry.spare(self._trials.left, now, registry.answered, registry.died)
        )

    async def _leg(self, placed: Placed) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The responses of one leg."""
        before, reported = self.so_far, len(self._usages)
        order = self._order(placed)
        self._legs += 1
        self._note_profile(placed)
        self._admitted = None
        self._handoff = types_pb2.Handoff()
        try:
            async with aclosing(run_leg(placed.worker, order)) as events:
                async for event in events:
                    response = self._take(event, placed)
                    if self._trials is not None:
                        self._trials.served(placed.key, self.so_far - before)
                    if response is not None:
                        yield response
                    if self._stopped and event.finish == UNFINISHED:
                        return  # the worker has not seen the stop: its leg is cancelled
        finally:
            if len(self._usages) == reported:  # the leg failed or was cancelled
                self._usages.append(
                    lost_leg(
                        placed.key,
                        placed.worker.address,
                        placed.role,
                        self.so_far - before,
                        self._admitted,
                    )
                )
        prefilled = placed.role == types_pb2.ROLE_PREFILL and self.so_far > before
        if self._finish == UNFINISHED and not prefilled:
            raise Unavailable(
                f"{placed.worker.address} ended its leg without finishing the request"
            )

    def _note_profile(self, placed: Placed) -> None:
        """Count a stream that continues where rounding may differ (``--numerics loose``)."""
        before = self._profile
        self._profile = placed.worker.info.numeric_profile if placed.worker.info else before
        if before and self._outputs and self._profile != before:
            self._parts.placer.mixed_numerics += 1

    async def _retry(self, placed: Placed, error: KvrelayError, generated: int) -> None:
        """Carry out the retry step after a failed leg; raises the error that ends the request."""
        if self._finish != UNFINISHED:
            return  # the output is complete; only the usage of the leg is lost
        request, parts, worker = self.request, self._parts, placed.worker
        streaming = bool(self._outputs) or self._follows is not None
        leg = FailedLeg(placed.key, error, generated, streaming)
        now = time.monotonic()
        step = parts.retry.failed(
            request, self._attempts, leg, now, parts.registry.answered, parts.registry.died
        )
        if step.backoff:
            worker.backoff_until = now + step.backoff
        if step.suspect:
            parts.registry.suspect(worker, error)
        if step.error is not None:
            if isinstance(step.error, PoisonRequest):
                log.error("request %s: %s", request.id, step.error)
            raise step.error
        if step.confirm:
            await parts.registry.confirm(request.deadline)
        pause = min(step.resume_at, request.deadline.at) - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        if step.settle_until:
            await self._settle(Deadline(min(step.settle_until, request.deadline.at)))

    async def _settle(self, until: Deadline) -> None:
        """Wait until silent workers have answered or are found dead.

        An answer of a worker that is used again changes nothing in the registry: look again.
        """
        registry, settled = self._parts.registry, lambda: not self._recount_deaths()
        while not until.expired and not await registry.wait_for(
            settled, until.earlier(SETTLE_LOOK_SECONDS)
        ):
            pass

    def _recount_deaths(self) -> float:
        """As ``RetryControl.recount`` at this moment."""
        if not self._attempts.left:
            return 0.0
        registry, now = self._parts.registry, time.monotonic()
        try:
            return self._parts.retry.recount(
                self.request, self._attempts, now, registry.answered, registry.died
            )
        except PoisonRequest as error:
            log.error("request %s: %s", self.request.id, error)
            raise

    def _next_leg(self) -> NextLeg:
        request, attempts, follows = self.request, self._attempts, self._follows
        if not self._outputs and follows is None:
            self._bound = self._parts.placer.rebind(self._bound, request.prompt, request.tenant)
        return NextLeg(
            prompt_tokens=len(request.prompt),
            so_far=self.so_far,
            positions=request.positions,
            bound=self._bound,
            deadline=request.deadline,
            excluded=attempts.excluded,
            avoided=attempts.avoided,
            last_error=attempts.last,
            computed=follows is not None,
            near="" if follows is None else follows.worker,
            among=self._among(),
        )

    def _order(self, placed: Placed) -> LegOrder:
        request = self.request
        leg = types_pb2.Leg(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            output_token_ids=self._outputs,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            namespace_digest=self._bound.digest,
            explain=request.explain,
            tenant_salt=request.tenant.salt,
            generation_id=self._id,
            leg_index=self._legs,
        )
        return LegOrder(
            leg=leg,
            handoff=self._handoff,
            work=placed.work,
            positions=request.positions,
            deadline=request.deadline,
            handoff_wait=self._parts.handoff_wait,
            span=request.span,
        )

    def _take(self, event: LegEvent, placed: Placed) -> router_pb2.GenerateResponse | None:
        """Apply one event. Returns the response to send, ``None`` if there are no new tokens."""
        if event.usage is not None:
            event.usage.address = placed.worker.address
            self._parts.placer.learn(placed, self._bound.prefix, event.usage)
            self._usages.append(event.usage)
        self._handoff = event.handoff or self._handoff
        self._admitted = event.admitted or self._admitted
        tokens, text = event.tokens, ""
        for count, token in enumerate(tokens, 1):
            delta = self._text.push(token.id, self._ending.ends(self.so_far, token.id))
            self._outputs.append(token.id)
            text += delta.text
            if delta.stopped:
                self._stopped = True
                tokens = tokens[:count]
                break
        self._note_finish(event)
        if self._leads is not None and event.handoff is not None:
            self._leads.trials.served(placed.key)
            self._leads.note(self._bound, "")
        elif self._leads is not None and tokens and placed.role == types_pb2.ROLE_DECODE:
            self._leads.note(self._bound, placed.key)
        return self._response(tokens, text) if tokens else None

    def _note_finish(self, event: LegEvent) -> None:
        if self._finish != UNFINISHED:
            return  # this event is the usage of the leg, after its last token
        if self._stopped:
            self._finish = STOP
        elif event.finish != UNFINISHED:
            self._finish = event.finish
        elif self.so_far >= self.request.max_tokens:
            self._finish = LENGTH

    def _response(
        self,
        tokens: Sequence[types_pb2.Token],
        text: str,
        finish: types_pb2.FinishReason.ValueType = UNFINISHED,
    ) -> router_pb2.GenerateResponse:
        """A response; the first one also carries what a client needs to resume."""
        request = self.request
        response = router_pb2.GenerateResponse(tokens=tokens, index=request.sample)
        if self._first_token_seconds is None:
            self._first_token_seconds = time.monotonic() - request.received_at
            response.request_id = request.id
            response.seed = request.sampling.seed
            response.weights = self._bound.weights
            response.prompt_hash = request.prompt_hash
            if self._follows is None and (hit := self._hit()) is not None:
                response.cached_prompt_tokens = hit
        response.finish_reason = finish
        self._reader.fill(response, text, last=finish != UNFINISHED)
        return response

    def _hit(self) -> int | None:
        """Tokens of the prompt that the first leg of the first call found cached, if known."""
        request = self.request
        if request.hit is not None or request.resumes or self._unheard:
            return request.hit
        legs = [*self._usages, self._admitted] if self._admitted else self._usages
        return hit_of(legs)

    def _last_response(self) -> router_pb2.GenerateResponse:
        response = self._response((), "" if self._stopped else self._text.flush(), self._finish)
        prompt, hit, first = len(self.request.prompt), self._hit(), self._first_token_seconds or 0.0
        usage = request_usage(self._usages, prompt, hit, self.so_far, self._waited, first)
        response.usage.CopyFrom(usage)
        return response
