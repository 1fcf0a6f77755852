"""The routes of the HTTP door, and the edge at which errors of a request become responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.errors import KvrelayError, Unavailable
from kvrelay.process import logs
from kvrelay.rpc import tracing
from router.http.access import Access
from router.http.backend import Backend
from router.http.connection.table import HttpLimits
from router.http.errors import HttpRefusal, body_of
from router.http.exchange import Disconnected, Exchange
from router.http.headers import REQUEST_ID, TRACE, identifying, request_id_of, texts_of
from router.http.pages import Pages
from router.http.request import HttpRequest

log = logging.getLogger("kvrelay.router")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


class _Edge:
    """One endpoint as an ASGI application; the process's edge for its requests."""

    def __init__(self, handler: Handler, limits: HttpLimits) -> None:
        self._handler = handler
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("\n"):  # the `$` of Starlette's expressions allows it
            raise HTTPException(404)
        exchange = Exchange(scope, receive, send, self._limits)
        logs.serves(exchange.request_id)
        try:
            await self._handler(exchange)
        except Disconnected:
            log.debug("request %s: its client has left", exchange.request_id)
        except asyncio.CancelledError:  # by the server, whose grace has ended
            await exchange.fail(Unavailable("this router ends: ask another one"))
        except KvrelayError as error:
            await exchange.fail(error)
        except Exception as error:  # noqa: BLE001 - the edge: it ends this request
            await _fail_unknown(exchange, error)


class _Generate:
    """The two endpoints that generate; they differ in the shape of body and answer."""

    def __init__(self, backend: Backend, access: Access, chat: bool) -> None:
        self._backend = backend
        self._access = access
        self._chat = chat
        self._path = CHAT if chat else COMPLETIONS

    async def __call__(self, exchange: Exchange) -> None:
        with (
            self._access.admitted(exchange.headers) as caller,
            self._backend.counted(caller.tenant, "http", exchange.peer) as record,
        ):
            exchange.check()
            async with exchange.attended():
                about = {"http.request.method": "POST", "url.path": self._path}
                headers = exchange.headers.items()
                with tracing.serving(f"POST {self._path}", headers, about) as span:
                    request = HttpRequest(self._backend, self._chat, exchange, record, span)
                    try:
                        await request.serve()
                    except KvrelayError as error:
                        record.fail(error)
                        span.fail(error)
                        await exchange.fail(error)
                    finally:
                        if exchange.status:
                            span.set({"http.response.status_code": exchange.status})


async def _fail_unknown(exchange: Exchange, error: Exception) -> None:
    log.error("request %s failed", exchange.request_id, exc_info=error)
    await exchange.fail(KvrelayError("internal error, see the server's log"))


def make_app(
    backend: Backend, access: Access, limits: HttpLimits, metrics: Callable[[], bytes]
) -> ASGIApp:
    """The application of one router; ``metrics`` makes the text of the metrics page."""
    pages = Pages(backend, access, metrics)

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, _Edge(handler, limits), methods=[method])

    app = Starlette(
        routes=[
            route(CHAT, "POST", _Generate(backend, access, chat=True)),
            route(COMPLETIONS, "POST", _Generate(backend, access, chat=False)),
            route("/v1/models", "GET", pages.models),
            route("/v1/models/{model:path}", "GET", pages.model),
            route("/tokenize", "POST", pages.tokenize),
            route("/detokenize", "POST", pages.detokenize),
            route("/metrics", "GET", pages.metrics),
            route("/health", "GET", pages.health),
            route("/ready", "GET", pages.ready),
        ],
        exception_handlers={HTTPException: _refused},
        middleware=_middleware(backend.config.cors_origin),
    )
    # Behind a TLS proxy a redirection would send the client, with its key, to http://.
    app.router.redirect_slashes = False
    return app


def _middleware(origins: Sequence[str]) -> list[Middleware]:
    """Lets pages of these origins use the API from a browser; no cookie counts here."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, TRACE, "retry-after"),
        )
    ]


async def _refused(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, of paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException), "the handler is registered for this class"
    path, method = request.scope["path"], request.method
    if error.status_code == 405:
        what, code = f"{method} {path!r:.200}", "method_not_supported"
        advice = f"use {(error.headers or {}).get('Allow')}"
    else:
        what, code = f"no page {path!r:.200}", "not_found"
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        pages = [route.path.replace(":path}", "}") for route in routes]
        advice = f"there are {', '.join(pages)}"
    refusal = HttpRefusal(error.status_code, code, what, advice)
    known = texts_of(request.headers.raw)
    response = JSONResponse(body_of(refusal), error.status_code, headers=error.headers)
    response.raw_headers.extend(identifying(known, request_id_of(known)))
    return response
