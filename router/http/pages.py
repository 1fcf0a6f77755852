"""The endpoints that generate nothing: models, tokens, health, metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrelay.errors import NotFound, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import router_pb2, types_pb2
from router.generate.request import InboundCall
from router.http.access import Access
from router.http.ask import check_rest, read_input
from router.http.backend import Backend
from router.http.exchange import Exchange, JsonObject
from router.http.fields import Fields, shown
from router.http.shapes import Json
from router.queue.inbox import Inbound
from router.workers.candidate import longest

METRICS = b"text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """``metrics`` makes the text of the metrics page."""

    def __init__(self, backend: Backend, access: Access, metrics: Callable[[], bytes]) -> None:
        self._backend = backend
        self._access = access
        self._metrics = metrics
        self._since = int(time.time())

    async def models(self, exchange: Exchange) -> None:
        with self._access.admitted(exchange.headers):
            await exchange.reply({"object": "list", "data": [self._model()]})

    async def model(self, exchange: Exchange) -> None:
        with self._access.admitted(exchange.headers):
            self._check_model(exchange.path_parameter("model"))
            await exchange.reply(self._model())

    async def health(self, exchange: Exchange) -> None:
        """The process answers."""
        await exchange.reply({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        """A request would find a worker now."""
        if self._backend.draining:
            raise Unavailable("this router is draining: ask another one")
        if not self._backend.registry.usable(types_pb2.ROLE_DECODE):
            raise self._backend.registry.missing(types_pb2.ROLE_DECODE)
        await exchange.reply({"status": "ready"})

    async def metrics(self, exchange: Exchange) -> None:
        """The text of the metrics port; of all tenants together, so not for tenants."""
        self._access.check_operator(exchange.headers)
        await exchange.reply_raw(self._metrics(), METRICS)

    async def tokenize(self, exchange: Exchange) -> None:
        """The token ids of a prompt, or of a conversation as the chat template renders it."""
        strings = False

        def inbound_of(body: JsonObject) -> Inbound:
            nonlocal strings
            fields, message = Fields(body), router_pb2.GenerateRequest()
            message.model = fields.text("model") or ""
            chat = fields.raw("messages") is not None
            if chat and fields.raw("prompt") is not None:
                raise Rejected("messages", "prompt is given too: leave one out")
            if not chat and not isinstance(given := fields.raw("prompt"), str):
                raise Rejected("prompt", f"give one text, or messages; got {shown(given)}")
            read_input(fields, message, chat)
            strings = fields.flag("return_token_strs")
            check_rest(fields, self._backend.config.strict_fields)
            return Inbound(message=message)

        async with self._called(exchange, inbound_of) as call:
            tokens, names = await self._backend.tokenize(call, lambda: strings)
            answer: Json = {
                "count": len(tokens),
                "max_model_len": self._longest(),
                "tokens": list(tokens),
                "token_strs": names,
            }
            await exchange.reply(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of token ids, special tokens included."""

        def inbound_of(body: JsonObject) -> Inbound:
            fields, message = Fields(body), router_pb2.GenerateRequest()
            message.model = fields.text("model") or ""
            tokens = fields.ids("tokens")
            check_rest(fields, self._backend.config.strict_fields)
            if tokens is None:
                raise Rejected("tokens", "missing: give a list of token ids")
            message.token_ids.ids.extend(tokens)
            return Inbound(message=message)

        async with self._called(exchange, inbound_of) as call:
            await exchange.reply({"prompt": await self._backend.detokenize(call)})

    @asynccontextmanager
    async def _called(
        self, exchange: Exchange, inbound_of: Callable[[JsonObject], Inbound]
    ) -> AsyncIterator[InboundCall]:
        with self._access.admitted(exchange.headers) as caller:
            exchange.check()
            async with exchange.attended():
                deadline, tenant = Deadline.after(self._backend.config.timeout), caller.tenant

                async def read() -> Inbound:
                    return await exchange.read(self._backend.bodies, tenant, inbound_of)

                yield InboundCall(exchange.sender(tenant), deadline, read)

    def _check_model(self, name: str) -> None:
        known = self._backend.config.model_name
        if name != known:
            raise NotFound(f"model: {name!r:.200} is not served here, {known!r} is")

    def _longest(self) -> int | None:
        workers = self._backend.placer.candidates()
        return longest(workers) if workers else None

    def _model(self) -> Json:
        name = self._backend.config.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "kvrelay",
            "root": name,
            "parent": None,
            "max_model_len": self._longest(),
        }
