"""``kvrelay load`` as a command, with its figures as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cli.dispatch import main


@dataclass(frozen=True)
class Loaded:
    """What the command said and wrote."""

    status: int
    out: str
    err: str
    json: dict[str, Any]

    @property
    def levels(self) -> list[dict[str, Any]]:
        found = self.json["levels"]
        assert isinstance(found, list)
        return found

    @property
    def check(self) -> dict[str, Any]:
        found = self.json["check"]
        assert isinstance(found, dict)
        return found


class LoadCommand:
    """Runs the command in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *words: object) -> Loaded:
        path = self.folder / "load.json"
        path.unlink(missing_ok=True)
        self._capsys.readouterr()
        given = ["load", "--json", str(path), "--no-progress", *map(str, words)]
        try:
            status = main(given)
        except SystemExit as end:
            status = int(str(end.code))
        seen = self._capsys.readouterr()
        text = path.read_text() if path.exists() else ""
        return Loaded(status, seen.out, seen.err, json.loads(text) if text else {})


@contextmanager
def refusing_server(status: int, *messages: str) -> Iterator[str]:
    """The URL of a server that refuses every request; each POST gets the next message."""
    said = cycle(messages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._refuse(messages[0])

        def do_POST(self) -> None:
            self._refuse(next(said))

        def _refuse(self, message: str) -> None:
            text = json.dumps({"error": {"message": message}}).encode()
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Standard error is the command's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class OddServer:
    """A server with fixed answers. ``page`` is its metrics page; a page of ``None`` never comes.

    ``events``: the data of each event of a stream, after which one with a finish reason follows.
    """

    def __init__(self, *events: str, status: int = 200, retry_after: str = "") -> None:
        self.events = events
        self.status = status
        self.retry_after = retry_after
        self.pages: dict[str, str | None] = {"/v1/models": '{"data": [{"id": "odd"}]}'}
        self.keys: dict[str, str | None] = {}
        self.ended = threading.Event()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers["content-length"] or 0))
        text: str | None = "".join(f"data: {event}\n\n" for event in self.events)
        if handler.command == "GET":
            self.keys[handler.path] = handler.headers["authorization"]
            text = self.pages.get(handler.path, "")
        if text is None:
            self.ended.wait()
            return
        handler.send_response(self.status if handler.command == "POST" else 200)
        handler.send_header("content-length", str(len(text)))
        if self.retry_after:
            handler.send_header("retry-after", self.retry_after)
        handler.end_headers()
        with suppress(ConnectionError):  # a client that has left
            handler.wfile.write(text.encode())


@contextmanager
def serve(odd: OddServer) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            odd.answer(self)

        def do_POST(self) -> None:
            odd.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Standard error is the command's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            odd.ended.set()
            server.shutdown()
            thread.join()
