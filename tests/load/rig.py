"""``kvrelay load`` as a command, with its figures as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
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
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server that gives every GET and POST to ``answer``, each in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            answer(self)

        def do_POST(self) -> None:
            self.do_GET()

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


def send(handler: BaseHTTPRequestHandler, status: int, text: str, retry_after: str) -> None:
    """A whole response; ``retry_after`` is left out if it is empty."""
    body = text.encode()
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    if retry_after:
        handler.send_header("retry-after", retry_after)
    handler.end_headers()
    with suppress(ConnectionError):  # a client that has left
        handler.wfile.write(body)


@contextmanager
def refusing_server(status: int, *messages: str) -> Iterator[str]:
    """The URL of a server that refuses every request; each POST gets the next message."""
    said = cycle(messages)

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        message = next(said) if handler.command == "POST" else messages[0]
        send(handler, status, json.dumps({"error": {"message": message}}), "0")

    with answering(refuse) as url:
        yield url


class OddServer:
    """A server with fixed answers: ``events`` has the data of each event of a stream.

    ``pages``: the text of each path that is read with GET; for ``None`` no response ever comes.
    """

    def __init__(self, *events: str, status: int = 200, retry_after: str = "") -> None:
        self.events = events
        self.status = status
        self.retry_after = retry_after
        self.pages: dict[str, str | None] = {"/v1/models": '{"data": [{"id": "odd"}]}'}
        self.keys: dict[str, str | None] = {}
        self.ended = threading.Event()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "POST":
            stream = "".join(f"data: {event}\n\n" for event in self.events)
            send(handler, self.status, stream, self.retry_after)
            return
        self.keys[handler.path] = handler.headers["authorization"]
        page = self.pages.get(handler.path, "")
        if page is None:
            self.ended.wait()
        else:
            send(handler, 200, page, "")


@contextmanager
def serve(odd: OddServer) -> Iterator[str]:
    """Its URL. Responses that never come end with the block."""
    with answering(odd.answer) as url:
        try:
            yield url
        finally:
            odd.ended.set()
