"""The port that Prometheus reads: plain HTTP, for this machine unless told otherwise.

Bounded on all sides: so many connections at once, so many seconds for each, and whoever sends what
is no request is no error of ours.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvrelay.errors import Rejected
from kvrelay.rpc.security.policy import installed

log = logging.getLogger("kvrelay.rpc")
MOST_CONNECTIONS = 32
SECONDS = 5.0  # of each read
MOST_SECONDS = 15.0  # of a connection, however often something comes

Request = socket.socket | tuple[bytes, socket.socket]


class _Handler(WSGIRequestHandler):
    timeout = SECONDS

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Request, client_address: object) -> None:
        """In a thread of its own, while there is a place for it."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Request, client_address: object) -> None:
        over = threading.Timer(MOST_SECONDS, _cut, (request,))
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._places.release()

    def handle_error(self, request: Request, client_address: object) -> None:
        """A client that left, or sent nonsense."""
        log.debug("metrics: a request of %s failed", client_address, exc_info=True)


def _cut(request: Request) -> None:
    with suppress(OSError):  # it has ended
        if isinstance(request, socket.socket):
            request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Answer scrapes at ``http://host:port/metrics`` from now on; ``Rejected`` if it cannot."""
    installed().check_plain("metrics_host", host)
    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, make_wsgi_app(registry), kind, _Handler)
    except OSError as error:
        raise Rejected(
            "metrics_port", f"cannot listen on {host}:{port} ({error.strerror}): choose another one"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
