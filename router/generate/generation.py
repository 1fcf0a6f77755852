"""One request under way: while it is not finished, choose a worker and run a leg there.

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

from kvrelay.errors import Exhausted, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.protocol import Role
from kvrelay.text.output import OutputText
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2, types_pb2
from router.config import RouterConfig
from router.generate.legs import UNFINISHED, LegEvent, run_leg
from router.generate.request import AcceptedRequest
from router.generate.retry import WELL_SERVED, Attempts, PoisonRequest, RetryKind, RetryLimits
from router.generate.usage import lost, usage
from router.placement.placer import Placed, Placer
from router.placement.policy import Prefix
from router.workers.loss import WorkerLost

log = logging.getLogger("kvrelay.router")
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


class Generation:
    """Owns the tokens so far, their text, and the accounts of the legs."""

    def __init__(
        self,
        request: AcceptedRequest,
        prefix: Prefix,
        digest: bytes,
        dispatcher: Placer,
        tokenizer: Tokenizer,
        config: RouterConfig,
        received: float,
    ) -> None:
        self._request = request
        self._prefix = prefix
        self._digest = digest
        self._dispatcher = dispatcher
        self._config = config
        self._tried = Attempts(RetryLimits(config.max_failures, config.max_deaths))
        self._text = OutputText(tokenizer, request.sampling.stop, request.sampling.min_tokens)
        self._outputs = list(request.outputs)
        self._accounts: list[types_pb2.LegUsage] = []
        self._handoff = types_pb2.Handoff()
        self._begun: types_pb2.Admission | None = None  # of the leg under way
        self._finish: types_pb2.FinishReason.ValueType = UNFINISHED
        self._stopped = False
        self._received = received
        self._first_token_seconds = 0.0
        self._told = False
        self._generation = secrets.randbits(64)
        self._legs = 0

    @property
    def tokens(self) -> int:
        """All that workers can come to hold for it."""
        return self._request.positions

    @property
    def prompt_tokens(self) -> int:
        """Those of its prompt."""
        return len(self._request.prompt)

    @property
    def so_far(self) -> int:
        """Tokens of its output."""
        return len(self._outputs)

    @property
    def part(self) -> float:
        """Of its output that is still to be made."""
        return 1.0 - self.so_far / self._request.max_tokens

    @property
    def sampling(self) -> types_pb2.Sampling:
        """As asked for, with the seed."""
        return self._request.sampling

    def replay(self, ending: Sequence[int]) -> None:
        """Take the tokens so far in; they may have finished it, but only with the last one."""
        last = len(self._outputs) - 1
        for index, token in enumerate(self._outputs):
            self._stopped = self._text.push(token).stopped
            armed = index >= self._request.sampling.min_tokens
            if self._stopped or (armed and token in ending):
                self._finish = STOP
                if index < last:
                    raise Rejected(
                        f"output_token_ids[{index + 1}]", "the output had ended before this token"
                    )
        if self._finish == UNFINISHED and last + 1 >= self._request.max_tokens:
            self._finish = LENGTH

    async def responses(self) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """The whole stream; closing it cancels whatever leg is under way."""
        self._dispatcher.poisons.check(self._request, time.monotonic())
        while self._finish == UNFINISHED:
            found = await self._dispatcher.place(
                self._request, self._prefix, len(self._outputs), self._tried
            )
            before = len(self._outputs)
            try:
                async with aclosing(self._leg(found)) as responses:
                    async for response in responses:
                        yield response
            except KvrelayError as error:
                await self._failed(found, error, len(self._outputs) - before)
        yield self._last()

    async def _leg(self, found: Placed) -> AsyncGenerator[router_pb2.GenerateResponse]:
        """Relay what one leg brings."""
        worker = found.worker
        before, accounts = len(self._outputs), len(self._accounts)
        try:
            message = self._message()
            self._legs = self._legs + 1
            self._begun = None
            events = run_leg(
                worker,
                found.work,
                message,
                self._handoff,
                self._request.deadline,
                self._config.handoff_wait,
            )
            self._handoff = types_pb2.Handoff()
            async with aclosing(events):
                async for event in events:
                    response = self._take(event, found)
                    if response is not None:
                        yield response
                    if self._stopped and event.finish == UNFINISHED:
                        return  # the worker goes on: its leg is cancelled
        finally:
            if len(self._accounts) == accounts:  # it failed, or was ended here
                generated = len(self._outputs) - before
                account = lost(found.key, worker.address, found.role, generated, self._begun)
                self._accounts.append(account)
        if self._finish == UNFINISHED and not self._progressed(found.role, before):
            raise Unavailable(f"{worker.address} ended its leg without finishing the request")

    def _progressed(self, role: Role, before: int) -> bool:
        return role == types_pb2.ROLE_PREFILL and len(self._outputs) > before

    def _message(self) -> types_pb2.Leg:
        request = self._request
        return types_pb2.Leg(
            request_id=request.id,
            prompt_token_ids=request.prompt,
            output_token_ids=self._outputs,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            namespace_digest=self._digest,
            explain=request.explain,
            tenant_salt=request.tenant.salt,
            generation_id=self._generation,
            leg_index=self._legs,
        )

    def _take(self, event: LegEvent, found: Placed) -> router_pb2.GenerateResponse | None:
        """Book one event; the response that relays it, ``None`` without tokens."""
        if event.usage is not None:
            event.usage.address = found.worker.address
            self._dispatcher.learn(found, self._prefix, event.usage)
            self._accounts.append(event.usage)
        if event.handoff is not None:
            self._handoff = event.handoff
        self._begun = event.begun or self._begun
        tokens, text = event.tokens, ""
        for count, token in enumerate(tokens, 1):
            self._outputs.append(token.id)
            piece = self._text.push(token.id)
            text += piece.text
            if piece.stopped:
                self._stopped = True
                tokens = tokens[:count]
                break
        self._note_finish(event)
        return self._response(tokens, text) if tokens else None

    def _note_finish(self, event: LegEvent) -> None:
        if self._finish != UNFINISHED:
            return  # this event is the account of the leg, after its last token
        if self._stopped:
            self._finish = STOP
        elif event.finish != UNFINISHED:
            self._finish = event.finish
        elif len(self._outputs) >= self._request.max_tokens:
            self._finish = LENGTH

    def _response(
        self, tokens: Sequence[types_pb2.Token], text: str
    ) -> router_pb2.GenerateResponse:
        if self._told:
            return router_pb2.GenerateResponse(tokens=tokens, text=text)
        self._told = True
        self._first_token_seconds = time.monotonic() - self._received
        return router_pb2.GenerateResponse(
            request_id=self._request.id,
            tokens=tokens,
            text=text,
            seed=self._request.sampling.seed,
            weights=self._request.weights,
            prompt_hash=self._request.prompt_hash,
        )

    def _last(self) -> router_pb2.GenerateResponse:
        text = "" if self._stopped else self._text.flush()
        response = self._response((), text)
        response.finish_reason = self._finish
        account = usage(
            self._accounts, len(self._request.prompt), len(self._outputs), self._first_token_seconds
        )
        response.usage.CopyFrom(account)
        return response

    async def _failed(self, found: Placed, error: KvrelayError, gained: int) -> None:
        """Go on elsewhere, or raise the error when that cannot help or was done too often."""
        if self._finish != UNFINISHED:
            return  # all tokens are there; only the account of the leg is lost
        worker = found.worker
        try:
            now, answered = time.monotonic(), self._dispatcher.registry.answered
            what = self._tried.failed(found.key, error, gained, bool(self._outputs), now, answered)
        except PoisonRequest as refused:
            log.error("request %s: %s", self._request.id, refused)
            self._dispatcher.poisons.note(self._request, time.monotonic())
            raise
        if isinstance(error, Exhausted):
            self._dispatcher.full(worker, error)
        if what is RetryKind.SUSPECT:
            self._dispatcher.registry.suspect(worker, error)
        deadline = self._request.deadline
        deadline.check("to go on with the answer")
        if isinstance(error, WorkerLost) and gained < WELL_SERVED:  # one more death could refuse it
            await self._dispatcher.registry.confirm(deadline)
        seconds = self._dispatcher.pause(error, what, bool(self._outputs))
        if seconds:
            await asyncio.sleep(min(seconds, deadline.remaining()))
