"""``kvrelay load`` as a command, with its figures as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
