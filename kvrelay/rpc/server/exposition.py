"""The port that Prometheus scrapes: plain HTTP, by default for this machine only.

The number of connections and the duration of each are bounded; malformed requests are not logged as
errors of the server.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvrelay.errors import Rejected
from kvrelay.rpc.address import Address
from kvrelay.rpc.reserved import is_reserved
from kvrelay.rpc.security.policy import installed

log = logging.getLogger("kvrelay.rpc")
MAX_CONNECTIONS = 32
READ_SECONDS = 5.0
CONNECTION_SECONDS = 15.0  # for a whole connection

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
        timer = threading.Timer(CONNECTION_SECONDS, _shut_down, (request,))
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._free_connections.release()

    def handle_error(self, request: Request, client_address: object) -> None:
        """Log a disconnected client or a malformed request for debugging only."""
        log.debug("metrics: a request of %s failed", client_address, exc_info=True)


def _shut_down(request: Request) -> None:
    with suppress(OSError):  # it is closed already
        if isinstance(request, socket.socket):
            request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


def page_of(registry: CollectorRegistry) -> WSGIApplication:
    """The metrics page, always in Prometheus's text format.

    prometheus_client 0.26.0 writes ``kvrelay_`` for ``kvrelay:`` in samples of OpenMetrics, the
    format that Prometheus prefers, so no series would have its documented name
    (prometheus/client_python issue 1177). A test fails once it is fixed.
    """
    inner = make_wsgi_app(registry)

    def page(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        content: Iterable[bytes] = inner(environ, start_response)
        return content

    return page


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Answer scrapes at ``http://host:port/metrics`` in a thread of its own.

    Raises ``Rejected`` if the port cannot be bound, or if other machines can reach it.
    """
    installed().check_plain("metrics_host", host)
    try:
        options = {"allow_reuse_port": is_reserved(Address(host, port))}
        kind = type("_Server", (_Server6 if ":" in host else _Server,), options)
        server: WSGIServer = make_server(host, port, page_of(registry), kind, _Handler)
    except OSError as error:
        raise Rejected(
            "metrics_port",
            f"cannot listen on {host}:{port} ({error.strerror}): choose another port",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
