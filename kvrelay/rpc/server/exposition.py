"""The port that Prometheus scrapes.

For this machine it is plain HTTP. On an address that other machines reach it has the TLS of the
process and asks for a token, as the other ports do. The number of connections and the duration of
each are bounded; malformed requests are not logged as errors of the server.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.bearer import SCHEME
from kvrelay.rpc.reserved import is_reserved
from kvrelay.rpc.security.identity import CallerKind
from kvrelay.rpc.security.policy import installed
from kvrelay.rpc.security.tls import server_context
from kvrelay.rpc.server.authorization import refused

log = logging.getLogger("kvrelay.rpc")
MAX_CONNECTIONS = 32
READ_SECONDS = 5.0
CONNECTION_SECONDS = 15.0  # for a whole connection
METHODS = ("GET", "HEAD")
PATHS = ("/", "/metrics")

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

Request = socket.socket | tuple[bytes, socket.socket]


class _Handler(WSGIRequestHandler):
    timeout = READ_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    context: ssl.SSLContext | None = None  # with one, connections begin with a handshake

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Request, client_address: object) -> None:
        """Serve the connection in a thread of its own, or close it if all are taken."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Request, client_address: object) -> None:
        if self.context is not None and isinstance(request, socket.socket):
            request.settimeout(READ_SECONDS)
            request = self.context.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
        timer = threading.Timer(CONNECTION_SECONDS, _shut_down, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free_connections.release()

    def finish_request(self, request: Request, client_address: object) -> None:
        """Shake hands first, in the connection's own thread."""
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
        super().finish_request(request, client_address)

    def handle_error(self, request: Request, client_address: object) -> None:
        """Log a disconnected client or a malformed request for debugging only."""
        log.debug("metrics: a request of %s failed", client_address, exc_info=True)


def _shut_down(request: Request) -> None:
    with suppress(OSError):  # it is closed already
        if isinstance(request, socket.socket):
            socket.socket.shutdown(request, socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


def page_of(registry: CollectorRegistry, *, guarded: bool = False) -> WSGIApplication:
    """The application of the port. ``guarded``: callers must show a token that may read the page.

    The page is always in Prometheus's text format: prometheus_client 0.26.0 writes ``kvrelay_`` for
    ``kvrelay:`` in samples of OpenMetrics, the format that Prometheus prefers, so no series would
    have its documented name (prometheus/client_python issue 1177). A test fails once it is fixed.
    """
    inner = make_wsgi_app(registry)

    def page(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        refusal = _refusal(environ, guarded)
        if refusal is not None:
            return _answer(environ, start_response, *refusal)
        if environ["PATH_INFO"] == "/":
            return _answer(environ, start_response, "200 OK", "the metrics are at /metrics\n")
        environ.pop("HTTP_ACCEPT", None)
        if environ["REQUEST_METHOD"] == "GET":
            content: Iterable[bytes] = inner(environ, start_response)
            return content
        headers = list[tuple[str, str]]()

        def keep(status: str, given: list[tuple[str, str]]) -> None:
            headers.extend(given)

        text = b"".join(inner({**environ, "REQUEST_METHOD": "GET"}, keep))
        start_response("200 OK", [*headers, ("Content-Length", str(len(text)))])
        return []

    return page


def _refusal(environ: WSGIEnvironment, guarded: bool) -> tuple[str, str] | None:
    """Status and text for a request that gets no page."""
    if environ["REQUEST_METHOD"] not in METHODS:
        return "405 Method Not Allowed", "the metrics are read with GET\n"
    if environ["PATH_INFO"] not in PATHS:
        return "404 Not Found", "no such page; the metrics are at /metrics\n"
    known = installed().credentials
    if not guarded or not known.required or environ["PATH_INFO"] == "/":
        return None
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    found = known.identify(token.strip()) if scheme.lower() == SCHEME.strip().lower() else None
    if found is None:
        refused["unauthenticated"] += 1
        return "401 Unauthorized", "send `Authorization: Bearer TOKEN`, see docs/security.md\n"
    if found.kind is CallerKind.CLIENT:
        refused["forbidden"] += 1
        return "403 Forbidden", "a tenant may not read this page\n"
    return None


def _answer(
    environ: WSGIEnvironment, start_response: StartResponse, status: str, text: str
) -> Iterable[bytes]:
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))]
    if status.startswith("401"):
        headers.append(("WWW-Authenticate", "Bearer"))
    if status.startswith("405"):
        headers.append(("Allow", ", ".join(METHODS)))
    start_response(status, headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text.encode()]


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Answer scrapes at ``/metrics`` of this address in a thread of its own.

    Raises ``Rejected`` if the port cannot be bound, or if other machines could reach it without
    encryption or authentication.
    """
    address = Address(host, port)
    remote = not address.local
    if remote:
        installed().check_listen(address, "metrics_host")
    encrypted = remote and installed().tls is not None
    context = server_context(lambda: installed().used_tls) if encrypted else None
    try:
        options = {"allow_reuse_port": is_reserved(address), "context": context}
        kind = type("_Server", (_Server6 if ":" in host else _Server,), options)
        page = page_of(registry, guarded=remote)
        server: WSGIServer = make_server(host, port, page, kind, _Handler)
    except OSError as error:
        raise Rejected(
            "metrics_port",
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
