"""The routes of the HTTP door, and the edge at which errors of a request become responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.errors import KvrelayError, NotFound, Unavailable
from kvrelay.v1 import types_pb2
from router.http.access import Access
from router.http.connections import HttpLimits
from router.http.errors import HttpRefusal, body_of
from router.http.exchange import Disconnected, Exchange
from router.http.generate import Backend, Generate
from router.workers.candidate import longest

log = logging.getLogger("kvrelay.router")
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


class _Edge:
    """One endpoint as an ASGI application; the process's edge for its requests."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self._handler = handler
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._limits)
        try:
            await self._handler(exchange)
        except Disconnected:
            log.debug("request %s: its client has left", exchange.request_id)
        except KvrelayError as error:
            await exchange.fail(error)
        except Exception as error:  # noqa: BLE001 - the edge: it ends this request
            await _fail_unknown(exchange, error)


async def _fail_unknown(exchange: Exchange, error: Exception) -> None:
    log.error("request %s failed", exchange.request_id, exc_info=error)
    await exchange.fail(KvrelayError("internal error, see the server's log"))


class Pages:
    """The endpoints that generate nothing."""

    def __init__(self, backend: Backend, access: Access) -> None:
        self._backend = backend
        self._access = access
        self._since = int(time.time())

    async def models(self, exchange: Exchange) -> None:
        with self._access.admitted(exchange.headers):
            await exchange.reply({"object": "list", "data": [self._model()]})

    async def model(self, exchange: Exchange) -> None:
        with self._access.admitted(exchange.headers):
            name, known = exchange.path_parameter("model"), self._backend.config.model_name
            if name != known:
                raise NotFound(f"model: {name!r:.200} is not served here, {known!r} is")
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

    def _model(self) -> dict[str, object]:
        name, workers = self._backend.config.model_name, self._backend.placer.candidates()
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "kvrelay",
            "root": name,
            "parent": None,
            "max_model_len": longest(workers) if workers else None,
        }


def make_app(backend: Backend, access: Access, limits: HttpLimits) -> ASGIApp:
    """The application of one router."""
    pages = Pages(backend, access)

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, _Edge(handler, limits), methods=[method])

    return Starlette(
        routes=[
            route("/v1/chat/completions", "POST", Generate(backend, access, chat=True)),
            route("/v1/completions", "POST", Generate(backend, access, chat=False)),
            route("/v1/models", "GET", pages.models),
            route("/v1/models/{model:path}", "GET", pages.model),
            route("/health", "GET", pages.health),
            route("/ready", "GET", pages.ready),
        ],
        exception_handlers={HTTPException: _refused},
    )


async def _refused(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, of paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException), "the handler is registered for this class"
    path, method = request.url.path, request.method
    what = f"no page {path!r:.200}" if error.status_code == 404 else f"{method} {path!r:.200}"
    refusal = HttpRefusal(error.status_code, "not_found", f"{what}: {error.detail}")
    return JSONResponse(body_of(refusal), error.status_code, headers=error.headers)
